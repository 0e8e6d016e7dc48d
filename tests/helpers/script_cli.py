"""Loads the programs in scripts/ into the tests' process, and reads what they leave behind."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    """The program ``scripts/NAME.py`` as a module; its ``main`` is not called."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(run, capsys, *arguments, silent: bool = True) -> str:
    """The one line that a refused command prints to standard error.

    Args:
        run: calls the program; its exit status. silent: nothing may be on standard output.
    """
    capsys.readouterr()
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == "" or not silent
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def manifest_of(dest) -> dict:
    return json.loads((Path(dest) / "manifest.json").read_text())


def names(directory) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())
