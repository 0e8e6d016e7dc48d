"""Bits per character of n-grams on a prepared corpus, with the evaluation protocol of the networks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.data.text.words import load_vocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.ngram import NGrams


@dataclass(frozen=True)
class Text:
    """A prepared corpus as symbol numbers in [0, V), -1 for unknown symbols.

    Attributes:
        name: of the corpus. symbols: V. train: [T]. splits: the texts to score.
    """

    name: str
    symbols: int
    train: np.ndarray
    splits: dict[str, np.ndarray]


def read_text(directory: str | Path, splits: Sequence[str]) -> Text:
    """Reads the training text and the splits to score.

    Raises:
        UsageError: a file is missing or damaged, the training text has unknown symbols, or a split has only
            such.
    """
    vocabulary = load_vocabulary(directory)
    entries = vocabulary.model_indices()
    number = np.full(max(len(vocabulary), int(entries.max()) + 1), -1, dtype=np.int64)
    number[entries] = np.arange(len(entries))

    def read(split: str) -> np.ndarray:
        return number[np.asarray(open_stream(Path(directory) / split, len(number)))]

    train = read("train")
    unknown = int((train < 0).sum())
    if unknown:
        raise UsageError(f"{directory}: the training text has {unknown:,} unknown symbols, expected none")
    texts = {split: read(split) for split in splits}
    for split, text in texts.items():
        if not (text >= 0).any():
            raise UsageError(f"{directory}: no symbol of the split {split} occurs in the training text")
    return Text(vocabulary.corpus or str(directory), len(entries), train, texts)


def score(text: Text, highest: int) -> dict:
    """Returns the bits per character of the orders 1 to ``highest`` on every split.

    Returns:
        what the command prints, ready for JSON.
    """
    with tqdm(total=1 + len(text.splits), desc="n-grams", unit="text", disable=None, leave=False) as progress:
        model = NGrams(text.train, text.symbols, highest)
        progress.update()
        rows = [
            {"order": n + 1, "ngrams": len(order.keys), "bpc": {}} for n, order in enumerate(model.orders)
        ]
        splits = {}
        for name, symbols in text.splits.items():
            for row, probability in zip(rows, model.probabilities(symbols), strict=True):
                row["bpc"][name] = float(-np.log2(probability[symbols >= 0]).mean())
            splits[name] = {"symbols": len(symbols), "scored": int((symbols >= 0).sum())}
            progress.update()
    return {
        "corpus": text.name,
        "symbols": text.symbols,
        "train": len(text.train),
        "splits": splits,
        "orders": rows,
    }
