"""scripts/install.sh: what it installs, and where."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("setup.cfg", "setup.py", "pyproject.toml", "constraints.txt")
# Notes its arguments and the constraint in place of running Python. The headers for fairseq are noted
# too, and with small ones its build fails if TORCH_IS_OTHER is set.
PYTHON = """#!/bin/sh
echo "$PIP_CONSTRAINT $*" >> "$(dirname "$0")/calls"
case "$*" in *fairseq-fixed*)
    headers=${CFLAGS##*-I}
    ls "$headers/torch" >> "$(dirname "$0")/headers"
    [ -z "$TORCH_IS_OTHER" ] || [ ! -d "$headers" ];;
esac
"""


@pytest.fixture
def install(tmp_path):
    """Calls the script in a copy of the repository; the calls of the environment's interpreter."""
    root = tmp_path / "a b"
    native = "rhhn_fairseq/ops/native"
    shutil.copytree(ROOT / native, root / native, ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in SOURCES:
        shutil.copy(ROOT / name, root / name)
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(*arguments) -> list[str]:
        (python.parent / "calls").write_text("")
        script = ["bash", str(root / "scripts/install.sh"), *arguments]
        subprocess.run(script, check=True, env=os.environ | {"PYTHON": sys.executable})
        return (python.parent / "calls").read_text().splitlines()

    return run


def test_the_path_of_the_repository_may_have_spaces(install):
    assert all(call.startswith("constraints.txt -m pip install") for call in install()[1:])


def test_what_is_for_developers_has_what_is_installed_by_default_and_no_more(install):
    assert install("dev")[-1].endswith("--editable .[dev] --quiet --no-compile")
    assert install("all") == install("dev") == []
    assert install("docs")[-1].endswith("--editable .[docs] --quiet --no-compile")


@pytest.mark.parametrize("builds", [1, 2])
def test_small_headers_for_fairseq_and_where_they_fail_those_of_torch(install, monkeypatch, tmp_path, builds):
    monkeypatch.setenv("TORCH_IS_OTHER", "1" * (builds - 1))
    assert len([call for call in install() if "fairseq-fixed" in call]) == builds
    assert (tmp_path / "a b/.venv/bin/headers").read_text().split() == ["extension.h", "torch.h"]
