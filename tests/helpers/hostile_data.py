"""Damaged data directories."""

import shutil
import struct
from pathlib import Path

import numpy as np

from helpers.hostile import CHAR_LM, Case, evaluation, generation, training


def write(data: Path, name: str, content: bytes) -> None:
    (data / name).write_bytes(content)


def patch(data: Path, name: str, at: int, content: bytes) -> None:
    """Overwrites bytes of a file from a place on."""
    old = (data / name).read_bytes()
    write(data, name, old[:at] + content + old[at + len(content) :])


def cut(data: Path, name: str, keep: float) -> None:
    """Keeps the first share of a file."""
    old = (data / name).read_bytes()
    write(data, name, old[: int(len(old) * keep)])


def replace_by(make) -> object:
    """A damage that puts something else in the place of a file."""

    def damage(data: Path, name: str) -> None:
        (data / name).unlink()
        make(data / name)

    return damage


ODD_PLACES = {
    "missing": lambda path: None,
    "endless": lambda path: path.symlink_to("/dev/zero"),
}
ODD = {name: replace_by(make) for name, make in ODD_PLACES.items()}

DICTIONARY = {
    **ODD,
    "no text": lambda d, f: write(d, f, b"\xff\xfe\x00\x80 1\n"),
    "cut short": lambda d, f: cut(d, f, 0.3),
}

# Bytes 0-8 are the magic, 9-16 the version, 17 the type, 18-25 the number of sentences; then sizes, places.
INDEX = {
    **ODD,
    "cut short": lambda d, f: cut(d, f, 0.6),
    "garbage": lambda d, f: write(d, f, np.random.default_rng(1).bytes(400)),
    "more sentences than bytes": lambda d, f: patch(d, f, 18, struct.pack("<Q", 2**60)),
    "a negative length": lambda d, f: patch(d, f, 26, struct.pack("<i", -5)),
    "a place outside": lambda d, f: patch(d, f, (d / f).stat().st_size - 8, struct.pack("<q", 2**40)),
}

CONTENT = {
    **ODD,
    "cut short": lambda d, f: cut(d, f, 0.5),
    "one unknown symbol": lambda d, f: patch(d, f, 2, struct.pack("<H", 60000)),
}


def unequal(data: Path, split: str) -> None:
    """The target side is that of another split."""
    other = "valid" if split == "train" else "train"
    for end in ("bin", "idx"):
        shutil.copy(data / f"{other}.en-fr.fr.{end}", data / f"{split}.en-fr.fr.{end}")


def without_target(data: Path, split: str) -> None:
    for end in ("bin", "idx"):
        (data / f"{split}.en-fr.fr.{end}").unlink()


def without_split(data: Path, split: str) -> None:
    for path in data.glob(f"{split}.*"):
        path.unlink()


def other_dictionary(data: Path, split: str) -> None:
    """A dictionary of the right form, of another corpus."""
    (data / "dict.fr.txt").write_text("".join(f"word{number} 1\n" for number in range(5)))


DIRECTORY = {
    "unequal sides": unequal,
    "no target side": without_target,
    "split missing": without_split,
    "another dictionary": other_dictionary,
}

PLACES = {
    "missing": lambda path: None,
    "a file": lambda path: path.write_text("text"),
}

CHAR_FILES = {
    "dict.txt": DICTIONARY,
    "manifest.json": {
        # Without a manifest a directory is read as text.
        **{kind: damage for kind, damage in ODD.items() if kind != "missing"},
        "a list": lambda d, f: write(d, f, b"[1]"),
        "deeply nested": lambda d, f: write(d, f, b"[" * 100_000),
    },
    "train.idx": INDEX,
    "train.bin": CONTENT,
}

# Commands that damage reaches: their names, programs, arguments for a data directory, and split.
ON_PAIRS = {
    "train": ("train", lambda s, data: training(s, data=data), "train"),
    "generate": ("generate", lambda s, data: generation(s, data=data), "test"),
}


def _damaged(source: str, command, damage):
    """The arguments of a command on a damaged copy of a data directory."""

    def arguments(scene) -> list:
        data = scene.here / "data"
        shutil.copytree(getattr(scene, source), data)
        damage(data)
        return command(scene, data)

    return arguments


def _elsewhere(command, make):
    """The arguments of a command on something that is no data directory."""

    def arguments(scene) -> list:
        make(scene.here / "data")
        return command(scene, scene.here / "data")

    return arguments


def data_cases() -> list[Case]:
    """Every damage, in every program that reads what is damaged."""
    cases = []
    for name, (program, command, split) in ON_PAIRS.items():
        files = {"dict.en.txt": DICTIONARY, f"{split}.en-fr.en.idx": INDEX, f"{split}.en-fr.fr.bin": CONTENT}
        for file, damages in files.items():
            for kind, damage in damages.items():
                made = _damaged("pairs", command, lambda d, f=file, damage=damage: damage(d, f))
                cases.append(Case(f"pairs/{name}/{file} {kind}", program, made))
        for kind, damage in DIRECTORY.items():
            if (name, kind) == ("generate", "no target side"):
                continue
            made = _damaged("pairs", command, lambda d, damage=damage, split=split: damage(d, split))
            cases.append(Case(f"pairs/{name}/{kind}", program, made))
        for kind, make in PLACES.items():
            cases.append(Case(f"pairs/{name}/directory {kind}", program, _elsewhere(command, make)))
    on_chars = lambda s, data: training(s, data=data, model=CHAR_LM)  # noqa: E731
    for file, damages in CHAR_FILES.items():
        for kind, damage in damages.items():
            made = _damaged("chars", on_chars, lambda d, f=file, damage=damage: damage(d, f))
            cases.append(Case(f"chars/train/{file} {kind}", "train", made))
    for kind, make in PLACES.items():
        cases.append(Case(f"chars/train/directory {kind}", "train", _elsewhere(on_chars, make)))
        made = _elsewhere(lambda s, data: evaluation(s, data=data), make)
        cases.append(Case(f"chars/eval_lm/directory {kind}", "eval_lm", made))
    return cases
