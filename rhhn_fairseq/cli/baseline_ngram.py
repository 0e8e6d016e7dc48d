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
    from rhhn_fairseq.inspection.scores import read_text, score

    check_output("--json", args.json, Path(args.data).glob("*"))
    started = time.perf_counter()
    corpus = read_text(args.data, args.splits)
    report = score(corpus, args.max_order)
    report["seconds"] = round(time.perf_counter() - started, 1)
    print_report(report)
    if args.json is not None:
        with replace_file(args.json) as file:
            file.write(json.dumps(report, indent=1).encode() + b"\n")
        print(f"written: {args.json}")


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
