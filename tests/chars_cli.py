"""Runs scripts/prepare_chars.py within the tests' process, and reads back what it made."""

import importlib.util
import json
import zipfile
from pathlib import Path

from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.data.text.vocabulary import CharVocabulary

SCRIPT = Path(__file__).parents[1] / "scripts" / "prepare_chars.py"
SPLITS = ("train", "valid", "test")

spec = importlib.util.spec_from_file_location("prepare_chars", SCRIPT)
prepare_chars = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare_chars)


def run(*arguments) -> int:
    return prepare_chars.main([str(argument) for argument in arguments])


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


def manifest_of(dest) -> dict:
    return json.loads((Path(dest) / "manifest.json").read_text())


def names(directory) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def error_of(capsys, *arguments) -> str:
    """The one line that a refused command prints."""
    capsys.readouterr()
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def zip_of(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
