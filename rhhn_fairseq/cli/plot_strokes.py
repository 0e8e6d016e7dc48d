"""Draws lines of prepared handwriting with their texts, to inspect them before training.

Usage: %(prog)s data-bin/hershey --output lines.png
       %(prog)s data-bin/kanji --split valid --lines 24 --columns 6 --seed 2 --output kanji.svg

The lines are chosen at random, and drawn at one scale. Their numbers are those that
`rhhn write --prime SPLIT:NUMBER` takes.
"""

import os

from rhhn_fairseq.cli.parsers import add_output, make_parser
from rhhn_fairseq.errors import UsageError

MOST_LINES = 200


def main(argv=None) -> None:
    parser = make_parser("plot strokes", __doc__)
    parser.add_argument("data", help="directory of prepared handwriting")
    parser.add_argument("--split", default="train", help="split to draw from (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=12, help="how many lines (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=3, help="lines side by side (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the choice of lines (default: %(default)s)"
    )
    add_output(parser)
    args = parser.parse_args(argv)

    from rhhn_fairseq.generate.picture import MOST_COLUMNS

    for option, high in (("lines", MOST_LINES), ("columns", MOST_COLUMNS)):
        if not 1 <= getattr(args, option) <= high:
            raise UsageError(f"--{option} {getattr(args, option)}: choose from 1 to {high}")
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed} is too small, the smallest is 0")

    from rhhn_fairseq.data.strokes.store import StrokeSplit
    from rhhn_fairseq.generate.grid import drawn_lines, stroke_grid
    from rhhn_fairseq.inspection import plotting

    plotting.check_picture("--output", args.output)
    split = StrokeSplit(args.data, args.split)
    numbers = drawn_lines(len(split), args.lines, args.seed)
    arrays = {f"{args.split}:{number}": split.points(number) for number in numbers}
    plotting.save(stroke_grid(split, args.split, numbers, args.columns), args.output, arrays)
    print(f"written: {args.output} and {os.path.splitext(args.output)[0]}.npz")
