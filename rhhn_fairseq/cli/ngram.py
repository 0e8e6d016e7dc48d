"""Trains and scores character n-grams (interpolated modified Kneser-Ney) on a prepared corpus.

Usage: %(prog)s data-bin/ptb
       %(prog)s data-bin/ptb --max-order 8 --splits test --json ngram.json

DATA is a directory that rhhn prepare made. Each order is trained on the training text and scores every known
symbol of the other splits in order, as the networks do under the protocol carry. Nothing is tuned, so the
valid split is as unseen as the test split.
"""

import json
import time
from pathlib import Path

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

# Beyond this, characters repeat themselves: each further order costs memory and changes nothing.
HIGHEST_ORDER = 32


def main(argv=None) -> None:
    parser = make_parser("ngram", __doc__)
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

    from rhhn_fairseq.files import check_output, replace_file

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
    import numpy as np
    from tqdm import tqdm

    from rhhn_fairseq.data.text.stream import open_stream
    from rhhn_fairseq.data.text.words import load_vocabulary
    from rhhn_fairseq.inspection.ngram import NGrams

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
