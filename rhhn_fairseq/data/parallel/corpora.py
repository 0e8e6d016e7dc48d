"""The parallel corpora that ``prepare_translation`` knows, and how each is prepared by default."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from rhhn_fairseq.data.common.manifest import MANIFEST_NAME, SPLITS, ManifestForm, load_manifest
from rhhn_fairseq.data.common.sources import FileSource, find_in_directory, user_file
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lines

PARALLEL = ManifestForm(
    "a parallel corpus",
    kind="parallel",
    format=1,
    files=r"dict\.\w+\.txt|pieces\.(model|vocab)|(train|valid|test\d*)\.\w+-\w+\.\w+\.(bin|idx)"
    r"|raw/((valid|test\d*)\.\w+)?",
    identity=("split", "language", "sha256"),
)


def pieces_sha256(data_dir: str | Path) -> str | None:
    """Returns the SHA-256 of the pieces' model, 64 hexadecimal digits; None if it is not recorded.

    Raises:
        UsageError: there is a manifest, but it cannot be read or its entry is not a SHA-256.
    """
    manifest = load_manifest(data_dir)
    checksum = manifest.get("pieces_sha256") if isinstance(manifest, dict) else None
    if checksum is not None and not re.fullmatch("[0-9a-f]{64}", str(checksum)):
        path = Path(data_dir) / MANIFEST_NAME
        raise UsageError(f"{path}: pieces_sha256 is {checksum!r}, not 64 hexadecimal digits")
    return checksum


# fairseq parses the languages from names such as train.en-fr.en.bin.
_LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

RawPair = tuple[bytes | None, bytes | None]
"""Two lines without their ends; None stands for a line longer than ``LONGEST_LINE``."""

_AT_END = object()


class Pairs(Protocol):
    """Text in two languages.

    name: its name in the report. texts: where it comes from, if it comes from files.
    """

    name: str
    texts: tuple[FileSource, ...]

    def read(self) -> Iterator[RawPair]:
        """Yields the pairs of lines in order. Raises UsageError if the text cannot be read."""


@dataclass(frozen=True)
class TextPairs:
    """Two texts whose lines correspond: source and target."""

    name: str
    texts: tuple[FileSource, FileSource]

    def read(self) -> Iterator[RawPair]:
        """Yields the pairs of lines in order.

        Raises UsageError, with both numbers of lines, if one text has more of them than the other.
        """
        both = zip_longest(*(lines(text.chunks()) for text in self.texts), fillvalue=_AT_END)
        for number, (source, target) in enumerate(both):
            if source is _AT_END or target is _AT_END:
                longer = number + 1 + sum(1 for _ in both)
                counts = (number, longer) if source is _AT_END else (longer, number)
                raise UsageError(
                    f"{self.texts[0].name} has {counts[0]:,} lines, but {self.texts[1].name} has "
                    f"{counts[1]:,}; each line must be the translation of the other file's"
                )
            yield source, target


@dataclass(frozen=True)
class Corpus:
    """What to prepare.

    train: cleaned and concatenated. valid: concatenated. tests: one test set each.
    options: what determines the text besides files; recorded in the manifest.
    known_files: size and SHA-256 of files that were read already, so that they are not read again.
    """

    name: str
    source_lang: str
    target_lang: str
    train: tuple[Pairs, ...]
    valid: tuple[Pairs, ...]
    tests: tuple[Pairs, ...]
    options: dict = field(default_factory=dict)
    known_files: dict[Path, dict] = field(default_factory=dict)

    def __post_init__(self):
        for side, language in zip(("source", "target"), self.languages, strict=True):
            if not _LANGUAGE.fullmatch(language):
                raise UsageError(f"--{side}-lang {language!r}: expected letters and digits, such as en")
        if self.source_lang == self.target_lang:
            raise UsageError(f"--target-lang {self.target_lang}: is the source language as well")

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target."""
        return self.source_lang, self.target_lang

    def evaluation_sets(self) -> dict[str, tuple[Pairs, ...]]:
        """Returns the sets by fairseq's names of the subsets: valid, test, test1, ..."""
        tests = {f"test{number or ''}": (pairs,) for number, pairs in enumerate(self.tests)}
        return {"valid": self.valid, **tests}


def files(paths: dict[str, Sequence[Path] | None], source_lang: str, target_lang: str) -> Corpus:
    """Returns the user's own files.

    paths: for each of train_src, train_tgt, valid_src, ... its files. The n-th source file and the
        n-th target file of a split belong together; every pair of test files is a test set.

    Raises:
        UsageError: a split lacks files or has unequal numbers of them, a file is missing, or a language is
            invalid.
    """
    pairs = {}
    for split in SPLITS:
        sources, targets = (paths[f"{split}_{side}"] or () for side in ("src", "tgt"))
        if not sources or len(sources) != len(targets):
            raise UsageError(
                f"--{split}-src names {len(sources)} files, and --{split}-tgt {len(targets)}; "
                "name source and target files of all three splits, which belong together one by one"
            )
        pairs[split] = tuple(
            TextPairs(Path(source).name, (user_file(source), user_file(target)))
            for source, target in zip(sources, targets, strict=True)
        )
    return Corpus("files", source_lang, target_lang, pairs["train"], pairs["valid"], pairs["test"])


def multi30k(from_dir: Path) -> Corpus:
    """Returns image captions, English to French, with the Flickr test sets of 2016 and 2017.

    Raises:
        UsageError: a file is missing.
    """

    def pairs(stem: str) -> tuple[Pairs, ...]:
        texts = tuple(find_in_directory(from_dir, f"{stem}.{language}") for language in ("en", "fr"))
        return (TextPairs(stem, texts),)

    train, valid = pairs("train"), pairs("val")
    return Corpus("multi30k", "en", "fr", train, valid, pairs("test_2016_flickr") + pairs("test_2017_flickr"))


# Captions are short, clean and few: all characters can be spelled, and only real junk is dropped.
MULTI30K_CLEANING = {"max_ratio": 4.0}
MULTI30K_PIECES = {"vocab_size": 8000, "character_coverage": 1.0}

# Small, with one piece per digit, so that figures can be copied.
SYNTHETIC_PIECES = {"vocab_size": 600, "model_type": "bpe", "character_coverage": 1.0, "split_digits": True}
