"""Loads the project's commands into the tests' process, and reads what they leave behind."""

import importlib
import json
from pathlib import Path
from types import ModuleType

COMMANDS = Path(__file__).parents[2] / "rhhn_fairseq" / "cli"


def load(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"rhhn_fairseq.cli.{name}")


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
