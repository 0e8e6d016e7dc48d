"""Runs rhhn prepare within the tests' process, and reads back what it made."""

import zipfile
from pathlib import Path

from helpers import script_cli
from helpers.script_cli import manifest_of, names  # noqa: F401  (for the tests)
from rhhn_fairseq.cli.running import run as run_main
from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.data.text.vocabulary import CharVocabulary

SCRIPT = script_cli.COMMANDS / "prepare.py"
SPLITS = ("train", "valid", "test")
prepare = script_cli.load("prepare")


def run(*arguments) -> int:
    """The exit status of the command."""
    return run_main(lambda: prepare.main([str(argument) for argument in arguments]))


def write_splits(directory, train="abc\nab\n", valid="ba\n", test="cb\n") -> list[str]:
    """Text files of the three splits, and the options that name them."""
    options = []
    for split, text in zip(SPLITS, (train, valid, test), strict=True):
        path = Path(directory) / f"{split}.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        options += [f"--{split}", str(path)]
    return options


def read_back(dest, split):
    vocabulary = CharVocabulary.load(dest)
    return vocabulary.decode(open_stream(Path(dest) / split, len(vocabulary)))


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def error_of(capsys, *arguments) -> str:
    return script_cli.error_of(run, capsys, *arguments)


def zip_of(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
