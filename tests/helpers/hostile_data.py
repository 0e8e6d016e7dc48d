"""Damaged data directories."""

import os
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


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


ODD_PLACES = {
    "missing": lambda path: None,
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
}
ODD = {name: replace_by(make) for name, make in ODD_PLACES.items()}

DICTIONARY = {
    **ODD,
    "empty": lambda d, f: write(d, f, b""),
    "no text": lambda d, f: write(d, f, b"\xff\xfe\x00\x80 1\n"),
    "without counts": lambda d, f: write(d, f, b"one\ntwo\n"),
    "count no number": lambda d, f: write(d, f, b"one many\n"),
    "a word twice": lambda d, f: write(d, f, b"one 1\none 1\n"),
    "cut short": lambda d, f: cut(d, f, 0.3),
    "zero bytes": lambda d, f: write(d, f, bytes(1000)),
}

# Bytes 0-8 are the magic, 9-16 the version, 17 the type, 18-25 the number of sentences; then sizes, places.
INDEX = {
    **ODD,
    "empty": lambda d, f: write(d, f, b""),
    "cut in its head": lambda d, f: write(d, f, (d / f).read_bytes()[:12]),
    "cut short": lambda d, f: cut(d, f, 0.6),
    "garbage": lambda d, f: write(d, f, np.random.default_rng(1).bytes(400)),
    "another version": lambda d, f: patch(d, f, 9, struct.pack("<Q", 7)),
    "an unknown type": lambda d, f: patch(d, f, 17, b"\x63"),
    "another type": lambda d, f: patch(d, f, 17, b"\x04"),
    "numbers with fractions": lambda d, f: patch(d, f, 17, b"\x06"),
    "more sentences than bytes": lambda d, f: patch(d, f, 18, struct.pack("<Q", 2**60)),
    "fewer sentences": lambda d, f: patch(d, f, 18, struct.pack("<Q", 3)),
    "no sentences": lambda d, f: patch(d, f, 18, struct.pack("<Q", 0)),
    "a negative length": lambda d, f: patch(d, f, 26, struct.pack("<i", -5)),
    "an absurd length": lambda d, f: patch(d, f, 26, struct.pack("<i", 2**31 - 1)),
    "no length": lambda d, f: patch(d, f, 26, struct.pack("<i", 0)),
    "a place outside": lambda d, f: patch(d, f, (d / f).stat().st_size - 8, struct.pack("<q", 2**40)),
    "a negative place": lambda d, f: patch(d, f, (d / f).stat().st_size - 8, struct.pack("<q", -64)),
}

CONTENT = {
    **ODD,
    "empty": lambda d, f: write(d, f, b""),
    "cut short": lambda d, f: cut(d, f, 0.5),
    "one byte short": lambda d, f: write(d, f, (d / f).read_bytes()[:-1]),
    "garbage": lambda d, f: write(d, f, np.random.default_rng(1).bytes((d / f).stat().st_size)),
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
    "empty": Path.mkdir,
    "a file": lambda path: path.write_text("text"),
    "a link to itself": lambda path: path.symlink_to(path),
}

CHAR_FILES = {
    "dict.txt": DICTIONARY,
    "manifest.json": {
        # Without a manifest a directory is read as text.
        **{kind: damage for kind, damage in ODD.items() if kind != "missing"},
        "empty": lambda d, f: write(d, f, b""),
        "garbage": lambda d, f: write(d, f, b"\xff\x00{"),
        "a list": lambda d, f: write(d, f, b"[1]"),
        "deeply nested": lambda d, f: nested(d / f),
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
    interactive = lambda s, data: generation(s, data=data)  # noqa: E731
    for kind, damage in DICTIONARY.items():
        made = _damaged("pairs", interactive, lambda d, damage=damage: damage(d, "dict.fr.txt"))
        cases.append(Case(f"pairs/interactive/dict.fr.txt {kind}", "interactive", made, stdin="▁one\n"))
    for kind, make in PLACES.items():
        made = _elsewhere(interactive, make)
        cases.append(Case(f"pairs/interactive/directory {kind}", "interactive", made, stdin="▁one\n"))
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
