"""Draws a metric of several trainings over their updates, and prints its best and last values as a table.

Usage: %(prog)s runs/lstm_s1.log runs/lstm_s2.log runs/h_detach_s1.log \\
           --metric accuracy --png copying.png

Each file is the output of one fairseq-train in any --log-format, and its name is the run's. Runs whose names
differ only in a seed at the end (_s1, -seed2) have one colour and a common line in the table.
"""

from rhhn_fairseq.commands.parsers import make_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    from rhhn_fairseq.analysis import curves
    from rhhn_fairseq.lines import check_output, replacing

    parser = make_parser("plot_curves", __doc__)
    add = parser.add_argument
    add("logs", nargs="+", metavar="LOG", help="output of fairseq-train")
    add("--metric", help=f"name of the figure (default: the first of {', '.join(curves.PREFERRED)} there is)")
    add("--subsets", default="valid", help="such as valid,train_inner (default: %(default)s)")
    add("--png", metavar="FILE", help="where to draw the curves")
    add("--table", metavar="FILE", help="write a table there, as Markdown")
    add("--better", choices=curves.BETTER, help="which value is the best (default: by the metric's name)")
    add("--threshold", type=float, metavar="VALUE", help="draw a line there, and say when it was reached")
    add("--title", help="title of the picture")
    add("--log-scale", action="store_true", help="logarithmic axis for the metric")
    args = parser.parse_args(argv)

    subsets = [name for name in args.subsets.split(",") if name]
    if not subsets:
        raise UsageError("--subsets names no subset, take for instance valid,train_inner")
    check_output("--png", args.png, (*args.logs, args.table))
    check_output("--table", args.table, args.logs)
    metric = args.metric or curves.choose_metric(args.logs, subsets)
    better = args.better or curves.default_better(metric)
    read = curves.read_curves(args.logs, metric, subsets)
    table = curves.table(read, metric, better, args.threshold)
    if args.png is not None:
        with replacing(args.png) as file:
            file.write(curves.picture(read, metric, args.title, args.threshold, args.log_scale))
    if args.table is not None:
        with replacing(args.table) as file:
            file.write(table.encode("utf-8"))
    print(table, end="")
