"""Packages that the plain installation leaves out: what needs them says so in one line."""

import sys

import pytest
from helpers.script_cli import error_of

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli import table
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for

MODULES = (
    "rhhn_fairseq.inspection.plotting",
    "rhhn_fairseq.inspection.pictures",
    "rhhn_fairseq.generate.picture",
    "rhhn_fairseq.data.parallel.synthetic",
    "rhhn_fairseq.demo.server",
)


@pytest.fixture
def plain(monkeypatch, tmp_path):
    """As after a plain installation, in an empty directory."""
    for name in ("matplotlib", "babel", "num2words", "HersheyFonts", "starlette", "uvicorn"):
        for loaded in [other for other in sys.modules if other.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
        package, _, attribute = name.rpartition(".")
        if package in sys.modules:
            monkeypatch.delattr(sys.modules[package], attribute, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("plot curves run.log", "pictures need matplotlib: pip install matplotlib, or '.[plots]'"),
        ("demo", "the page needs uvicorn: pip install uvicorn, or '.[demo]'"),
        (
            "prepare synthetic",
            "the corpus synthetic needs Babel: pip install Babel, or '.[synthetic]'",
        ),
    ],
)
def test_a_missing_package_is_named(plain, capsys, command, line):
    assert error_of(
        lambda *words: cli.run(lambda: table.dispatch(list(words))), capsys, *command.split()
    ) == (f"error: {line}\n")


def test_other_packages_are_no_mistake():
    with pytest.raises(ModuleNotFoundError), needed_for("this needs"):
        import no_such_package  # noqa: F401
    with (
        pytest.raises(UsageError, match="this needs scikit-learn: pip install scikit-learn"),
        needed_for("this needs"),
    ):
        raise ModuleNotFoundError("No module named 'sklearn.x'", name="sklearn.x")
