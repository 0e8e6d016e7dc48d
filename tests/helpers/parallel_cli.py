"""Runs rhhn prepare within the tests' process, on small texts of its own."""

import itertools
import sys
from pathlib import Path

from helpers import script_cli
from helpers.script_cli import manifest_of, names  # noqa: F401  (for the tests)
from rhhn_fairseq.cli.running import run as run_main

SCRIPT = script_cli.COMMANDS / "prepare.py"
SPLITS = ("train", "valid", "test")
prepare = script_cli.load("prepare")

_ENGLISH = "a man and the dog walk on street near old house with red door while it rains".split()
_FRENCH = "un homme et le chien marchent dans rue près vieille maison avec porte rouge quand pleut".split()


def sentences(count: int, first: int = 0) -> list[tuple[str, str]]:
    """Different pairs of sentences; the same for the same numbers."""
    numbers = range(first, first + count)
    return [tuple(_sentence(words, number) for words in (_ENGLISH, _FRENCH)) for number in numbers]


def _sentence(words: list[str], number: int) -> str:
    picked = [words[(number * 7 + step * (1 + number % 5)) % len(words)] for step in range(6)]
    return " ".join([*picked, str(number)])


def write_files(directory: Path, train=None, valid=None, test=None) -> list[str]:
    """Files of the three splits, each a list of pairs of str or bytes, and the options that name them."""
    given = {"train": train, "valid": valid, "test": test}
    defaults = {"train": sentences(200), "valid": sentences(5, 1000), "test": sentences(7, 2000)}
    options = []
    for split, (side, language) in itertools.product(SPLITS, (("src", "en"), ("tgt", "fr"))):
        pairs = defaults[split] if given[split] is None else given[split]
        path = Path(directory) / f"{split}.{language}"
        lines = (pair[side == "tgt"] for pair in pairs)
        data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        path.write_bytes(data)
        options += [f"--{split}-{side}", str(path)]
    return options


SMALL = ["--vocab-size", "60", "--workers", "1"]


def run(*arguments) -> int:
    """The exit status of the command."""
    return run_main(lambda: prepare.main([str(argument) for argument in arguments]))


def error_of(capsys, *arguments) -> str:
    """The one line of a refused command, which may have said before what it did."""
    return script_cli.error_of(run, capsys, *arguments, silent=False)


def contents(directory) -> dict[str, bytes]:
    """Everything below a directory but the manifest."""
    paths = (path for path in Path(directory).rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def lines_of(path) -> list[str]:
    return Path(path).read_bytes().decode().split("\n")[:-1]


def script(*arguments) -> list[str]:
    """The command line as a process of its own."""
    return [sys.executable, "-m", "rhhn_fairseq", "prepare", *map(str, arguments)]
