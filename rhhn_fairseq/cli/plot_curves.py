"""Draws a metric of several trainings over their updates, and prints its best and last values as a table.

Usage: %(prog)s runs/lstm_s1.log runs/lstm_s2.log runs/h_detach_s1.log \\
           --metric accuracy --output copying.png

Each file is the output of one fairseq-train in any --log-format, and its name is the run's. Runs whose names
differ only in a seed at the end (_s1, -seed2) are one line in a band, with a common line in the table.
"""

import os
import sys

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    from rhhn_fairseq.files import check_output, replace_file
    from rhhn_fairseq.inspection import curves, plotting
    from rhhn_fairseq.inspection.curve_picture import curve_arrays, draw_curves

    parser = make_parser("plot curves", __doc__)
    add = parser.add_argument
    add("logs", nargs="+", metavar="LOG", help="output of fairseq-train")
    add("--metric", help=f"name of the figure (default: the first found of {', '.join(curves.PREFERRED)})")
    add("--subsets", default="valid", help="subsets, such as valid,train_inner (default: %(default)s)")
    add("--x", choices=curves.AXES, default="updates", help="the x axis (default: %(default)s)")
    add(
        "--output",
        "--png",
        metavar="FILE",
        help="picture of the curves, PNG or SVG; its arrays go beside it as .npz",
    )
    add("--table", metavar="FILE", help="write a table there, as Markdown")
    add("--better", choices=curves.BETTER, help="which value is the best (default: by the metric's name)")
    add("--threshold", type=float, metavar="VALUE", help="draw a line there, and say when it was reached")
    add("--title", help="title of the picture")
    add("--log-scale", action="store_true", help="logarithmic axis for the metric")
    args = parser.parse_args(argv)

    subsets = [name for name in args.subsets.split(",") if name]
    if not subsets:
        raise UsageError("--subsets names no subset, take for instance valid,train_inner")
    plotting.check_picture("--output", args.output, (*args.logs, args.table))
    check_output("--table", args.table, args.logs)
    metric = args.metric or curves.choose_metric(args.logs, subsets)
    better = args.better or curves.default_better(metric)
    read = curves.read_curves(args.logs, metric, subsets, args.x)
    table = curves.table(read, metric, better, args.threshold)
    if args.output is not None:
        figure = draw_curves(read, metric, args.title, args.threshold, args.log_scale, args.x)
        plotting.save(figure, args.output, curve_arrays(read, metric, args.x))
    if args.table is not None:
        with replace_file(args.table) as file:
            file.write(table.encode("utf-8"))
    print(table, end="")
    if args.output is not None:
        print(f"written: {args.output} and {os.path.splitext(args.output)[0]}.npz", file=sys.stderr)
