"""Averages the weights of several checkpoints of one training.

Usage: %(prog)s checkpoints/gnmt --last 5 --output checkpoints/gnmt/average.pt
       %(prog)s checkpoints/gnmt --best 3 --output checkpoints/gnmt/average.pt
       %(prog)s a.pt b.pt --output average.pt

The result is a checkpoint for fairseq-generate, fairseq-eval-lm, fairseq-interactive and the scripts. Its
configuration is that of the newest, and it has no optimizer state.
"""

import os

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    args = parse_arguments(argv)
    for option in ("last", "best"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise UsageError(f"--{option} {getattr(args, option)} is too small, the smallest is 1")
    if args.metric is not None and args.best is None:
        raise UsageError(f"--metric {args.metric} goes with --best")
    if args.by is not None and args.last is None:
        raise UsageError(f"--by {args.by} goes with --last")

    from rhhn_fairseq.cli import averaging
    from rhhn_fairseq.files import check_output

    paths = select_checkpoints(args, averaging)
    check_output("--output", args.output, paths)
    averaging.save(averaging.average(paths, args.ema), args.output)
    for path in paths:
        print(f"averaged: {path}")
    print(f"written: {args.output}")


def select_checkpoints(args, averaging) -> list:
    """Returns the checkpoints to average."""
    if args.last is None and args.best is None:
        for path in args.inputs:
            if os.path.isdir(path):
                raise UsageError(
                    f"{path}: is a directory; say which of its checkpoints, --last N or --best N"
                )
        return args.inputs
    if len(args.inputs) != 1:
        raise UsageError("--last and --best take one directory of checkpoints")
    if args.last is not None:
        return averaging.last_checkpoints(args.inputs[0], args.last, args.by or "epoch")
    return averaging.best_checkpoints(args.inputs[0], args.best, args.metric)


def parse_arguments(argv):
    parser = make_parser("average", __doc__)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="CHECKPOINT", help="files, or with --last or --best their directory")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--last", type=int, metavar="N", help="the last N checkpoints of the directory")
    number.add_argument(
        "--best", type=int, metavar="N", help="the best N checkpoints, by the metric stored in them"
    )
    add("--by", choices=("epoch", "update"), help="what --last counts (default: epoch)")
    add("--metric", help="metric of --best, such as loss or bleu; needed if the checkpoints store several")
    add("--ema", action="store_true", help="average the weights that --store-ema keeps, not the trained ones")
    add("--output", required=True, metavar="FILE", help="the checkpoint to write")
    return parser.parse_args(argv)
