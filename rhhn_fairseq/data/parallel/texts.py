"""The first stage: cleans training text, and copies validation and test text as it is.

The folder then holds train.LANG, and valid.LANG, test.LANG, test1.LANG, ... in raw/: UTF-8, one sentence
per line, every line ended by a newline.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, compress
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.data.parallel.corpora import Corpus, Pairs, RawPair
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import line_problem
from rhhn_fairseq.options import check_fields, option

RAW = "raw"

REASONS = ("encoding", "empty", "length", "ratio", "duplicate")
"""Why a pair is dropped, in the order of the checks; the first reason that applies is counted."""

RATIO_MARGIN = 10
"""Characters added to both lengths before they are compared, so that one or two words make no difference."""

# Control characters other than white space, U+FFFD, which decoders write for invalid bytes, and U+0080 to
# U+009F, which in running text are the remains of one-byte encodings.
_DAMAGE = re.compile("[\\x00-\\x08\\x0e-\\x1f\\x7f-\\x9f\\ufffd]")

# A space, and what sentencepiece's normalisation turns into one.
_BLANK = " \u200b\u200e\u200f\u2581\ufeff"


@dataclass(frozen=True)
class CleaningConfig:
    """Limits of a training pair, for each of its sides; ``UsageError`` names a value that cannot work."""

    max_words: int = option(200, help="drop pairs with more words on a side", low=1)
    max_chars: int = option(1500, help="drop pairs with more characters on a side", low=1)
    max_ratio: float = option(
        2.5, help=f"drop pairs whose lengths in characters, plus {RATIO_MARGIN}, differ by more", low=1
    )
    keep_duplicates: bool = option(False, help="keep duplicate pairs")

    def __post_init__(self):
        check_fields(self, flags=True)


def write_texts(corpus: Corpus, config: CleaningConfig, folder: Path) -> dict:
    """Writes the texts of all subsets into ``folder``.

    Returns:
        cleaning: for each training text its name and how many pairs were read, kept and, by reason,
            dropped. evaluation: for each other subset its number of sentences and of empty lines.

    Raises:
        UsageError: the two sides have different numbers of lines, no training pair is left, or
            validation or test text is empty or not UTF-8.
    """
    (folder / RAW).mkdir()
    evaluation = {
        name: _copy_evaluation(name, pairs, corpus.languages, folder / RAW)
        for name, pairs in corpus.evaluation_sets().items()
    }
    cleaning = _clean_training(corpus, config, folder)
    if not any(counts["kept"] for counts in cleaning):
        dropped = ", ".join(
            f"{reason} {total:,}"
            for reason in REASONS
            if (total := sum(counts[reason] for counts in cleaning))
        )
        read = sum(counts["read"] for counts in cleaning)
        raise UsageError(
            f"no training pair of {read:,} is fit to train on ({dropped or 'the files are empty'}); "
            "check the files, or --max-words, --max-chars and --max-ratio"
        )
    return {"cleaning": cleaning, "evaluation": evaluation}


def clean(pair: RawPair, config: CleaningConfig) -> tuple[str, str] | str:
    """Returns the two sentences with single spaces between words, or the reason to drop the pair.

    Duplicates are not detected here.
    """
    if None in pair:
        return "length"
    try:
        texts = [line.decode("utf-8") for line in pair]
    except UnicodeDecodeError:
        return "encoding"
    if any(_DAMAGE.search(text) for text in texts):
        return "encoding"
    words = [text.split() for text in texts]
    source, target = (" ".join(side) for side in words)
    if not source.strip(_BLANK) or not target.strip(_BLANK):
        return "empty"
    lengths = sorted((len(source), len(target)))
    if lengths[1] > config.max_chars or max(map(len, words)) > config.max_words:
        return "length"
    if lengths[1] + RATIO_MARGIN > config.max_ratio * (lengths[0] + RATIO_MARGIN):
        return "ratio"
    return source, target


def _clean_training(corpus: Corpus, config: CleaningConfig, folder: Path) -> list[dict]:
    final = [folder / f"train.{language}" for language in corpus.languages]
    if config.keep_duplicates:
        counters = [_write_clean(pairs, config, final, None) for pairs in corpus.train]
    else:
        # Duplicates are known only when all pairs are read.
        candidates = [folder / f"candidates.{language}" for language in corpus.languages]
        keys = array("Q")
        counters = [_write_clean(pairs, config, candidates, keys) for pairs in corpus.train]
        repeated = mark_duplicates(np.frombuffer(keys, dtype=np.uint64))
        ends = np.cumsum([counter["candidates"] for counter in counters])
        for counter, marks in zip(counters, np.split(repeated, ends[:-1]), strict=True):
            counter["duplicate"] = int(np.count_nonzero(marks))
        for path, kept in zip(candidates, final, strict=True):
            with path.open("rb") as lines, kept.open("wb") as file:
                file.writelines(compress(lines, memoryview(~repeated)))
            path.unlink()
    return [_summary(pairs.name, counter) for pairs, counter in zip(corpus.train, counters, strict=True)]


def mark_duplicates(keys: np.ndarray) -> np.ndarray:
    """Returns whether the same key came before, bool [N]. It takes some 30 bytes a key."""
    repeated = np.ones(keys.size, dtype=bool)
    repeated[np.unique(keys, return_index=True)[1]] = False
    return repeated


def _write_clean(pairs: Pairs, config: CleaningConfig, texts: list[Path], keys: array | None) -> Counter:
    """Appends the clean pairs to ``texts`` and a key of each to ``keys``; returns the counts by reason."""
    counter = Counter()
    with ExitStack() as stack:
        source_file, target_file = (stack.enter_context(path.open("ab")) for path in texts)
        for raw in tqdm(pairs.read(), desc=f"cleaning {pairs.name}", unit="pair", disable=None):
            cleaned = clean(raw, config)
            if isinstance(cleaned, str):
                counter[cleaned] += 1
                continue
            source, target = (text.encode("utf-8") + b"\n" for text in cleaned)
            source_file.write(source)
            target_file.write(target)
            if keys is not None:
                # Two of 36 million different pairs share eight bytes with a probability of 1 in 28,000.
                keys.frombytes(blake2b(source + target, digest_size=8).digest())
            counter["candidates"] += 1
    return counter


def _summary(name: str, counter: Counter) -> dict:
    dropped = {reason: counter[reason] for reason in REASONS}
    kept = counter["candidates"] - counter["duplicate"]
    return {"name": name, "read": kept + sum(dropped.values()), "kept": kept, **dropped}


def _copy_evaluation(name: str, sources: tuple[Pairs, ...], languages: tuple[str, str], folder: Path) -> dict:
    """Copies the texts of one subset line by line, without cleaning them."""
    empty = [0, 0]
    count = 0
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"{name}.{language}").open("wb")) for language in languages]
        for lines in chain.from_iterable(map(_checked, sources)):
            count += 1
            for side, line in enumerate(lines):
                files[side].write(line + b"\n")
                empty[side] += not line.decode("utf-8").strip()
    if not count:
        names = " and ".join(text.name for source in sources for text in source.texts)
        raise UsageError(f"{names}: is empty, but the {name} set needs at least one sentence")
    return {
        "name": " + ".join(source.name for source in sources),
        "sentences": count,
        "empty": dict(zip(languages, empty, strict=True)),
    }


def _checked(pairs: Pairs) -> Iterator[tuple[bytes, bytes]]:
    """Yields the pairs as they are. Raises UsageError, naming file and line, for one that is not text."""
    for number, lines in enumerate(pairs.read(), start=1):
        for side, line in enumerate(lines):
            if problem := line_problem(line) or (b"\0" in line and "holds a NUL byte"):
                name = pairs.texts[side].name if pairs.texts else pairs.name
                raise UsageError(
                    f"{name}: line {number:,} {problem}; validation and test text is taken as it is, "
                    "so it must be UTF-8 text"
                )
        yield lines
