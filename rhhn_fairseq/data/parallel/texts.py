"""The first stage: cleans training text, and copies validation and test text as it is.

The folder then holds train.LANG, and valid.LANG, test.LANG, test1.LANG, ... in raw/: UTF-8, one sentence
per line, every line ended by a newline.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from itertools import chain, compress, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.data.parallel.cleaning import REASONS, CleaningConfig, clean
from rhhn_fairseq.data.parallel.corpora import Corpus, Pairs
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import LONGEST_LINE

RAW = "raw"

KEY = np.dtype(">u8")
"""Eight bytes of a hash. Two of 36 million different pairs share a key with a probability of 1 in 28,000."""

KEYS_IN_MEMORY = 1 << 21
"""Keys that are compared at a time, on average; each takes about 24 bytes then."""

_BLOCK = 1 << 16


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


def _clean_training(corpus: Corpus, config: CleaningConfig, folder: Path) -> list[dict]:
    final = [folder / f"train.{language}" for language in corpus.languages]
    if config.keep_duplicates:
        counters = [_write_clean(pairs, config, final, None) for pairs in corpus.train]
    else:
        # Duplicates are known only when all pairs are read.
        candidates = [folder / f"candidates.{language}" for language in corpus.languages]
        keys, marks = folder / "keys", folder / "marks"
        counters = [_write_clean(pairs, config, candidates, keys) for pairs in corpus.train]
        mark_duplicates(keys, marks)
        _count_marked(marks, counters)
        keys.unlink()
        for path, kept in zip(candidates, final, strict=True):
            _copy_unmarked(path, marks, kept)
            path.unlink()
        marks.unlink()
    return [_summary(pairs.name, counter) for pairs, counter in zip(corpus.train, counters, strict=True)]


def _write_clean(pairs: Pairs, config: CleaningConfig, texts: list[Path], keys: Path | None) -> Counter:
    """Appends the clean pairs to ``texts`` and a key of each to ``keys``; returns the counts by reason."""
    counter = Counter()
    with ExitStack() as stack:
        source_file, target_file = (stack.enter_context(path.open("ab")) for path in texts)
        key_file = stack.enter_context(keys.open("ab")) if keys else None
        for raw in tqdm(pairs.read(), desc=f"cleaning {pairs.name}", unit="pair", disable=None):
            cleaned = clean(raw, config)
            if isinstance(cleaned, str):
                counter[cleaned] += 1
                continue
            source, target = (text.encode("utf-8") + b"\n" for text in cleaned)
            source_file.write(source)
            target_file.write(target)
            if key_file:
                key_file.write(blake2b(source + target, digest_size=KEY.itemsize).digest())
            counter["candidates"] += 1
    return counter


def _count_marked(marks: Path, counters: list[Counter]) -> None:
    """Adds to each training text's counts the duplicates among its candidates."""
    with marks.open("rb") as file:
        for counter in counters:
            remaining = counter["candidates"]
            while remaining:
                block = file.read(min(remaining, _BLOCK))
                counter["duplicate"] += int(np.count_nonzero(np.frombuffer(block, dtype=np.uint8)))
                remaining -= len(block)


def _copy_unmarked(path: Path, marks: Path, final: Path) -> None:
    progress = tqdm(desc=f"writing {final.name}", total=marks.stat().st_size, unit="line", disable=None)
    with progress, path.open("rb") as lines, marks.open("rb") as mark_file, final.open("wb") as kept:
        while block := mark_file.read(_BLOCK):
            keep = np.frombuffer(block, dtype=np.uint8) == 0
            kept.writelines(compress(islice(lines, len(block)), keep.tolist()))
            progress.update(len(block))


def mark_duplicates(keys: Path, marks: Path) -> int:
    """Writes a byte for each key: 1 if the same key came before, else 0; returns the number of ones.

    The keys are divided into ranges, and each pass over the file compares the keys of one range.
    """
    count = keys.stat().st_size // KEY.itemsize
    ranges = 1 + count // KEYS_IN_MEMORY
    # Written, not only reserved: writing to a mapped file on a full disk would kill the process.
    with marks.open("wb") as file:
        for first in range(0, count, _BLOCK):
            file.write(bytes(min(_BLOCK, count - first)))
    if not count:
        return 0
    total = 0
    marked = np.memmap(marks, dtype=np.uint8, mode="r+")
    for index in range(ranges):
        values, positions = _keys_in_range(keys, index, ranges)
        order = np.argsort(values, kind="stable")
        values, positions = values[order], positions[order]
        repeated = positions[1:][values[1:] == values[:-1]]
        marked[repeated] = 1
        total += repeated.size
    marked.flush()
    return total


def _keys_in_range(keys: Path, index: int, ranges: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys in one range, [K] uint64, and their positions in the file, [K] int64."""
    values, positions = [], []
    start = 0
    with keys.open("rb") as file:
        while block := file.read(_BLOCK * KEY.itemsize):
            read = np.frombuffer(block, dtype=KEY).astype(np.uint64)
            # The upper half of a key times the number of ranges, shifted by 32 bits, is the range of the key.
            inside = np.flatnonzero((read >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32) == index)
            values.append(read[inside])
            positions.append(start + inside)
            start += read.size
    return np.concatenate(values), np.concatenate(positions)


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
            if problem := _problem(line):
                name = pairs.texts[side].name if pairs.texts else pairs.name
                raise UsageError(
                    f"{name}: line {number:,} {problem}; validation and test text is taken as it is, "
                    "so it must be UTF-8 text"
                )
        yield lines


def _problem(line: bytes | None) -> str | None:
    if line is None:
        return f"is longer than {LONGEST_LINE:,} bytes"
    if b"\0" in line:
        return "holds a NUL byte"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {line[error.start]:#04x} at position {error.start} of the line)"
    return None
