"""Child interpreters run no module of the working directory, which may hold somebody else's data."""

import shlex
import subprocess
from pathlib import Path

import pytest

import rhhn_fairseq
from rhhn_fairseq import programs

PLANTED = "open({mark!r}, 'w')\nraise SystemExit('a planted module ran')"
PACKAGE = Path(rhhn_fairseq.__file__).parent


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that exists once a planted module has run; the working directory is full of them."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ran"
    for name in ("numpy", "multiprocessing", "queue", "fairseq", "rhhn_fairseq"):
        (tmp_path / f"{name}.py").write_text(PLANTED.format(mark=str(path)))
    return path


@pytest.mark.parametrize("arguments", ["-c 'import numpy'", "-m rhhn_fairseq --help"])
def test_a_child_imports_nothing_from_the_working_directory(mark, arguments):
    subprocess.run(programs.interpreter(*shlex.split(arguments)), check=True, stdout=subprocess.DEVNULL)
    assert not mark.exists()


def test_every_child_interpreter_is_safe():
    """No other module builds the command of an interpreter, or spawns processes, by itself."""
    for word, known in (("sys.executable", {"running.py"}), ('get_context("spawn")', set())):
        files = {path.name for path in PACKAGE.rglob("*.py") if word in path.read_text()}
        assert files - {"programs.py"} <= known
