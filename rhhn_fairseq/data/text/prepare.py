"""Prepares a character corpus in fairseq's binary format.

Makes three passes over the text, each in chunks: checksums of the input, counts of the training symbols,
encoding. Memory does not grow with the corpus.
"""

import hashlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.data.common.destination import check_replaceable, make_once, one_at_a_time
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.common.sources import Source, next_character, read_codes
from rhhn_fairseq.data.text.corpora import Corpus, Input
from rhhn_fairseq.data.text.stream import StreamWriter
from rhhn_fairseq.data.text.vocabulary import (
    CHARACTERS,
    DICTIONARY_NAME,
    NEWLINE,
    UNK,
    CharVocabulary,
    escape,
    escape_byte,
)
from rhhn_fairseq.errors import UsageError

# A range of a source: bytes [start, stop), with None for the end.
Stretch = tuple[Source, int, int | None]


@one_at_a_time
def prepare(corpus: Corpus, dest: str | Path, force: bool = False, verify: bool = True) -> tuple[dict, bool]:
    """Prepares ``corpus`` in the directory ``dest``; returns its manifest, and whether it was there already.

    force: replace what an earlier run left at ``dest``, whatever it holds.
    verify: compare the input with published sizes and checksums.

    Raises UsageError for input that is empty, unreadable, or not the published one; and for a
    ``dest`` that holds something else.
    """
    check_replaceable(dest, force, CHARACTERS)
    inputs = [_inspect(entry, verify) for entry in corpus.inputs]
    request = {"corpus": corpus.name, "mode": corpus.mode, "options": corpus.options, "inputs": inputs}
    stretches = _stretches(corpus, inputs)
    packages = ("fairseq", "rhhn_fairseq")
    return make_once(
        CHARACTERS, dest, request, force, packages, lambda stage: _build(corpus, stretches, stage, verify)
    )


def report(manifest: dict) -> str:
    """Returns a table of the prepared splits, and the name of the corpus."""
    lines = [f"{'split':<6} {'symbols':>13} {'items':>11} {'unknown':>9}"]
    for split, counts in manifest["splits"].items():
        lines.append(f"{split:<6} {counts['symbols']:>13,} {counts['items']:>11,} {counts['unknown']:>9,}")
    lines.append(manifest["variant"])
    return "\n".join(lines)


def _inspect(entry: Input, verify: bool) -> dict:
    """Returns the size and SHA-256 of an input's unpacked bytes, checked against the published MD5."""
    sha256 = hashlib.sha256()
    # Some builds of Python forbid MD5 unless told that it is not used for security.
    md5 = hashlib.md5(usedforsecurity=False)
    published = entry.md5 if verify else None
    name = entry.source.name
    size = 0
    with tqdm(desc=f"reading {name}", unit="B", unit_scale=True, disable=None) as progress:
        for chunk in entry.source.chunks():
            sha256.update(chunk)
            if published:
                md5.update(chunk)
            size += len(chunk)
            progress.update(len(chunk))
    if not size:
        raise UsageError(f"{name}: is empty")
    if published and md5.hexdigest() != published:
        raise UsageError(
            f"{name}: expected MD5 {published} unpacked, found {md5.hexdigest()} of {size:,} bytes; "
            "replace the file, or pass --no-verify to accept it"
        )
    return {"split": entry.split, "name": Path(name).name, "bytes": size, "sha256": sha256.hexdigest()}


def _stretches(corpus: Corpus, inputs: list[dict]) -> dict[str, list[Stretch]]:
    """Returns which bytes of which sources make up each split."""
    if corpus.cut is None:
        return {
            split: [(entry.source, 0, None) for entry in corpus.inputs if entry.split == split]
            for split in SPLITS
        }
    source = corpus.inputs[0].source
    valid, test = corpus.cut(inputs[0]["bytes"])
    if corpus.mode == "text":
        valid, test = next_character(source, valid), next_character(source, test)
    offsets = ((0, valid), (valid, test), (test, None))
    return {split: [(source, start, stop)] for split, (start, stop) in zip(SPLITS, offsets, strict=True)}


def _build(corpus: Corpus, stretches: dict[str, list[Stretch]], stage: Path, verify: bool) -> dict:
    counts = _count(_codes(corpus, stretches["train"], "counting train"))
    vocabulary = _write_dictionary(stage / DICTIONARY_NAME, counts, corpus.mode)
    splits = {}
    for split in SPLITS:
        splits[split] = _encode(
            stage / split, vocabulary, _codes(corpus, stretches[split], f"encoding {split}")
        )
        symbols = splits[split]["symbols"]
        if symbols < 2:
            names = ", ".join(entry.source.name for entry in corpus.inputs if entry.split in (split, "all"))
            raise UsageError(f"{names}: the {split} split has fewer than 2 symbols ({symbols})")
        if verify and corpus.expected:
            unit, expected = corpus.expected[0], corpus.expected[1][split]
            if abs(splits[split][unit] - expected) * 1000 > expected:
                raise UsageError(
                    f"the {split} split has {splits[split][unit]:,} {unit}, expected about {expected:,}; "
                    "replace the file, or pass --no-verify to accept it"
                )
    if splits["train"]["symbols"] != counts.sum() or splits["train"]["unknown"]:
        raise UsageError("the training text changed while it was read; prepare the corpus again")
    number = len(vocabulary.model_indices())
    return {
        "variant": f"{corpus.variant}, {number} symbols",
        "mode": corpus.mode,
        "newline_occurs": vocabulary.newline_occurs,
        "symbols": number,
        "splits": splits,
    }


def _codes(corpus: Corpus, stretches: list[Stretch], title: str) -> Iterator[np.ndarray]:
    chunks = chain.from_iterable(
        read_codes(source, corpus.mode, start, stop, corpus.errors) for source, start, stop in stretches
    )
    if corpus.edit is not None:
        chunks = corpus.edit(chunks)
    with tqdm(desc=title, unit="symbol", unit_scale=True, disable=None) as progress:
        for codes in chunks:
            progress.update(codes.size)
            yield codes


def _count(chunks: Iterator[np.ndarray]) -> np.ndarray:
    """Returns how often each code occurs, int64 [largest code + 1]."""
    counts = np.zeros(NEWLINE + 1, dtype=np.int64)
    for codes in chunks:
        counted = np.bincount(codes)
        if counted.size > counts.size:
            counts = np.pad(counts, (0, counted.size - counts.size))
        counts[: counted.size] += counted
    return counts


def _write_dictionary(path: Path, counts: np.ndarray, mode: str) -> CharVocabulary:
    """Writes dict.txt, most frequent symbols first and ties by code; returns its vocabulary."""
    newline_occurs = bool(counts[NEWLINE])
    codes = np.flatnonzero(counts)
    codes = codes[codes != NEWLINE]
    codes = codes[np.lexsort((codes, -counts[codes]))]
    symbols = [escape_byte(code) if mode == "bytes" else escape(chr(code)) for code in codes]
    # Without newline="\n" some systems would write "\r\n".
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{symbol} {counts[code]}\n" for symbol, code in zip(symbols, codes, strict=True))
    return CharVocabulary(symbols, mode, newline_occurs)


def _encode(prefix: Path, vocabulary: CharVocabulary, chunks: Iterator[np.ndarray]) -> dict:
    unknown = 0
    with StreamWriter(prefix, len(vocabulary)) as writer:
        for codes in chunks:
            indices = vocabulary.encode_codes(codes)
            unknown += int(np.count_nonzero(indices == UNK))
            writer.write(indices, codes == NEWLINE)
    return {"symbols": writer.symbols, "items": writer.items, "unknown": unknown}
