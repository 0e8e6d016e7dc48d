"""Trains and scores character n-grams with modified Kneser-Ney smoothing (Chen and Goodman 1998, section 3).

Examples:
  python -m experiments.ngram data-bin/ptb
  python -m experiments.ngram data-bin/ptb --max-order 8 --splits test --json ngram.json

Each order is trained on the training text and scores every known symbol of the other splits in order, as the
networks do under the protocol carry. Nothing is tuned, so the valid split is as unseen as the test split.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.data.text.stream import open_stream
from rhhn_fairseq.data.text.words import load_vocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import check_output, replace_file

# Beyond this, characters repeat themselves: each further order costs memory and changes nothing.
HIGHEST_ORDER = 32
UNSEEN = -1
FALLBACK = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Counts:
    """The smoothed counts of one order, for the n-grams that occur in the training text.

    Attributes:
        kept: (c - D(c)) / c(h) by n-gram, float64 [N].
        gamma: the weight of the lower order by context, float64 [M], M the n-grams of the order below.
        discounts: (D1, D2, D3).
    """

    kept: np.ndarray
    gamma: np.ndarray
    discounts: tuple[float, float, float]


@dataclass(frozen=True)
class Order:
    """The n-grams of one order.

    Attributes:
        keys: context V + symbol, ascending, int64 [N]. A context is the index of its n - 1 symbols among the
            keys of the order below.
        top: the counts if this order is the highest. lower: the counts if it is not; None for the last order.
    """

    keys: np.ndarray
    top: Counts
    lower: Counts | None


class NGrams:
    """Kneser-Ney models of all orders up to ``order``.

    With c the count of an n-gram at the highest order, and at lower orders the number of different symbols
    that precede it (Kneser and Ney 1995), they are interpolated::

        p_n(w | h)  = (c(h w) - D(c(h w))) / c(h)  +  gamma(h) p_{n-1}(w | h')
        gamma(h)    = (D1 N1(h) + D2 N2(h) + D3 N3+(h)) / c(h)
        p_n(w | h)  = p_{n-1}(w | h')  if h was never seen;         p_0 = 1 / V

    c(h) is the sum of c(h w) over w, and h' is h without its first symbol. D(c) is 0 for c = 0, else D1, D2
    or D3 for counts of 1, 2, and 3 or more::

        Y = n1 / (n1 + 2 n2),   D1 = 1 - 2 Y n2 / n1,   D2 = 2 - 3 Y n3 / n2,   D3 = 3 - 4 Y n4 / n3

    from the numbers n1 to n4 of n-grams that have these counts. Low orders of characters have no rare
    n-grams, so these estimates do not exist; D is then (1/2, 1, 3/2), as in KenLM.

    All orders share their lower orders, so one pass over a text gives the probabilities by every order.

    Args:
        text: the training text, integers [T] in [0, V).
        symbols: V.
        order: the highest n.

    Raises:
        UsageError: the order is below 1, or the text is shorter than it.
    """

    def __init__(self, text: np.ndarray, symbols: int, order: int):
        if not 1 <= order <= len(text):
            raise UsageError(f"a text of {len(text)} symbols has no {order}-grams")
        self.symbols = symbols
        self.orders: list[Order] = []
        text = text.astype(np.int64)
        # Index of the n-gram that ends at each position, for the order below and for this one.
        below = np.zeros(len(text) + 1, dtype=np.int64)
        contexts, keys, counts = 1, None, None
        for n in range(1, order + 1):
            new_keys, first, places, new_counts = np.unique(
                below[:-1] * symbols + text[n - 1 :],
                return_index=True,
                return_inverse=True,
                return_counts=True,
            )
            if keys is not None:
                # Each distinct n-gram adds one to the count of the (n-1)-gram that it ends with.
                preceded = np.bincount(below[first + 1], minlength=len(keys))
                self._add(keys, counts, preceded, contexts)
                contexts = len(keys)
            keys, counts, below = new_keys, new_counts, places
        self._add(keys, counts, None, contexts)

    def _add(self, keys, counts, preceded, contexts: int) -> None:
        context = keys // self.symbols
        lower = None if preceded is None else smooth(preceded, context, contexts)
        self.orders.append(Order(keys, smooth(counts, context, contexts), lower))

    def probabilities(self, text: np.ndarray) -> Iterator[np.ndarray]:
        """Yields the probability of each symbol of a text by the model of order 1, then 2, and so on.

        Args:
            text: integers [T]. A symbol outside [0, V) has no probability, and no context spans it.

        Yields:
            float64 [T]; nan at symbols outside [0, V). The first symbols have shorter contexts.
        """
        text = text.astype(np.int64)
        known = (text >= 0) & (text < self.symbols)
        # Index of the n - 1 symbols before each position.
        context = np.zeros(len(text), dtype=np.int64)
        lower = np.where(known, 1.0 / self.symbols, np.nan)
        for order in self.orders:
            seen = (context != UNSEEN) & known
            place = np.full(len(text), UNSEEN)
            place[seen] = find(order.keys, context[seen] * self.symbols + text[seen])
            yield interpolate(order.top, context, place, lower)
            if order.lower is not None:
                lower = interpolate(order.lower, context, place, lower)
            context = np.concatenate([[UNSEEN], place[:-1]])


def smooth(counts: np.ndarray, context: np.ndarray, contexts: int) -> Counts:
    """Discounts the counts of one order.

    Args:
        counts: of each n-gram [N], zero where nothing precedes it.
        context: the index of each n-gram's context [N].
        contexts: M.
    """
    discounts = estimate_discounts(counts)
    by_count = np.array([0.0, *discounts])
    discount = by_count[np.minimum(counts, 3)]
    total = np.bincount(context, counts, minlength=contexts)
    removed = np.bincount(context, discount, minlength=contexts)
    # A context that only ends the text, or begins it, leaves everything to the lower order.
    gamma = np.divide(removed, total, out=np.ones(contexts), where=total > 0)
    kept = np.divide(counts - discount, total[context], out=np.zeros(len(counts)), where=counts > 0)
    return Counts(kept, gamma, discounts)


def estimate_discounts(counts: np.ndarray) -> tuple[float, float, float]:
    """Returns D1, D2 and D3, estimated from the numbers of n-grams with counts of 1, 2, 3 and 4."""
    n1, n2, n3, n4 = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    if not n1 or not n2 or not n3:
        return FALLBACK
    y = n1 / (n1 + 2 * n2)
    discounts = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
    possible = all(0 <= discount <= count for count, discount in enumerate(discounts, 1))
    return discounts if possible else FALLBACK


def interpolate(counts: Counts, context: np.ndarray, place: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Returns p_n from p_{n-1} [T], given the indices of the contexts and of the n-grams."""
    gamma = np.where(context == UNSEEN, 1.0, counts.gamma[context])
    return np.where(place == UNSEEN, 0.0, counts.kept[place]) + gamma * lower


def find(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the index of each number among ascending keys, ``UNSEEN`` if it is not among them."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, place, UNSEEN)


def main(argv=None) -> None:
    parser = make_parser("", __doc__)
    parser.prog = "python -m experiments.ngram"
    parser.add_argument("data", metavar="DATA", help="directory of a prepared corpus")
    parser.add_argument(
        "--max-order", type=int, default=12, metavar="N", help="score orders 1 to N (default: %(default)s)"
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        default=["valid", "test"],
        metavar="SPLIT",
        help="splits to score (default: valid test)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    args = parser.parse_args(argv)
    if not 1 <= args.max_order <= HIGHEST_ORDER:
        raise UsageError(f"--max-order {args.max_order} is not from 1 to {HIGHEST_ORDER}")

    check_output("--json", args.json, Path(args.data).glob("*"))
    started = time.perf_counter()
    report = score(args.data, args.splits, args.max_order)
    report["seconds"] = round(time.perf_counter() - started, 1)
    print_report(report)
    if args.json is not None:
        with replace_file(args.json) as file:
            file.write(json.dumps(report, indent=1).encode() + b"\n")
        print(f"written: {args.json}")


def score(directory: str, splits: list[str], highest: int) -> dict:
    """Returns the bits per character of the orders 1 to ``highest`` on every split, ready for JSON.

    Raises:
        UsageError: a file is missing or damaged, the training text has unknown symbols, or a split has only
            such.
    """
    vocabulary = load_vocabulary(directory)
    entries = vocabulary.model_indices()
    # Symbols as numbers in [0, V), and -1 for unknown ones.
    number = np.full(max(len(vocabulary), int(entries.max()) + 1), -1, dtype=np.int64)
    number[entries] = np.arange(len(entries))
    train, *texts = (
        number[np.asarray(open_stream(Path(directory) / split, len(number)))] for split in ("train", *splits)
    )
    if (train < 0).any():
        raise UsageError(f"{directory}: the training text has unknown symbols, expected none")
    for split, text in zip(splits, texts, strict=True):
        if not (text >= 0).any():
            raise UsageError(f"{directory}: no symbol of the split {split} occurs in the training text")
    with tqdm(total=1 + len(texts), desc="n-grams", unit="text", disable=None, leave=False) as progress:
        model = NGrams(train, len(entries), highest)
        progress.update()
        rows = [
            {"order": n + 1, "ngrams": len(order.keys), "bpc": {}} for n, order in enumerate(model.orders)
        ]
        for name, text in zip(splits, texts, strict=True):
            for row, probability in zip(rows, model.probabilities(text), strict=True):
                row["bpc"][name] = float(-np.log2(probability[text >= 0]).mean())
            progress.update()
    scored = [{"symbols": len(text), "scored": int((text >= 0).sum())} for text in texts]
    return {
        "corpus": vocabulary.corpus or directory,
        "symbols": len(entries),
        "train": len(train),
        "splits": dict(zip(splits, scored, strict=True)),
        "orders": rows,
    }


def print_report(report: dict) -> None:
    """Prints the figures as a table, and the data they refer to."""
    splits = report["splits"]
    print(f"{report['corpus']}; {report['train']:,} symbols to train on, {report['symbols']} different ones")
    print("order      n-grams" + "".join(f"{name + ' bpc':>13}" for name in splits))
    for row in report["orders"]:
        bits = "".join(f"{row['bpc'][name]:13.4f}" for name in splits)
        print(f"{row['order']:5d} {row['ngrams']:12,d}{bits}")
    for name, split in splits.items():
        share = 100 * split["scored"] / split["symbols"]
        print(f"{name}: {split['scored']:,} of {split['symbols']:,} symbols scored ({share:.2f} %)")
    print(f"{report['seconds']} s")


if __name__ == "__main__":
    sys.exit(cli.run(main))
