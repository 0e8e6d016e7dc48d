"""Measures speed and memory beside torch.nn.LSTM, the plain loops, fairseq's lstm and other packages.

Usage: %(prog)s cells [--cells lstm,ln_hyperlstm] [--hidden 1000] [--json FILE] [--png FILE]
       %(prog)s lm|gnmt-train|gnmt-decode|memory|products|scaling [--smoke]

Results are checked against float64 first. Ratios are medians over rounds, in each of which every contender
runs once.
"""

import dataclasses
import importlib
import os
import sys

from rhhn_fairseq.commands.parsers import make_parser
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.lines import check_output


def main(argv=None) -> None:
    from rhhn_fairseq import bench
    from rhhn_fairseq.bench import report as reports

    argv = sys.argv[1:] if argv is None else argv
    parser = make_parser("bench", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in bench.COMMANDS.items():
        # An abbreviated --smoke would be accepted, but not seen below.
        options = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        # The modules of other commands are not loaded: some import fairseq.
        if name in argv[:1]:
            add_options(options, bench.command(name))
            if "--smoke" in argv:
                options.set_defaults(**bench.command(name).SMOKE)
    args = vars(parser.parse_args(argv))
    module = bench.command(args.pop("command"))
    paths = {name: args.pop(name) for name in ("json", "png")}
    del args["smoke"]

    config = module.Config(**args)
    for name, path in paths.items():
        check_output(f"--{name}", path)
    if paths["png"] is not None:
        # Before minutes of measuring.
        check_picture(paths["png"], paths["json"])
        with needed_for("--png needs"):
            importlib.import_module("matplotlib")
    report = module.run(config)
    print(reports.render(report, module.COLUMNS))
    if paths["json"] is not None:
        reports.write_json(report, paths["json"])
    if paths["png"] is not None:
        reports.write_picture(module.draw(report), paths["png"])


def check_picture(path: str, figures: str | None) -> None:
    """Raises UsageError unless a picture's name ends in .png and is not that of the figures' file."""
    if os.path.splitext(path)[1].lower() != ".png":
        raise UsageError(f"--png {path}: the name of the picture ends in .png")
    if figures is not None and os.path.realpath(path) == os.path.realpath(figures):
        raise UsageError(f"--png {path}: is the file of --json, name another")


def add_options(parser, module) -> None:
    """Adds an option for each field of a command's configuration, and the options of every command."""
    for spec in dataclasses.fields(module.Config):
        several = isinstance(spec.default, tuple)
        parser.add_argument(
            f"--{spec.name.replace('_', '-')}",
            type=names if several else spec.type,
            default=spec.default,
            help=_help_of(spec),
        )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("--png", metavar="FILE", help="draw the figures there; the name ends in .png")


def _help_of(spec: dataclasses.Field) -> str:
    """Returns the help of an option; some texts say themselves what an empty default stands for."""
    text = spec.metadata["help"]
    return text if "(default: " in text else f"{text} (default: {shown(spec.default)})"


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def shown(default) -> str:
    return (",".join(default) if isinstance(default, tuple) else str(default)) or "none"
