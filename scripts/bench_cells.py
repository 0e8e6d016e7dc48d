"""Times forward and backward passes of the cells against torch.nn.LSTM of the same size.

Usage: python scripts/bench_cells.py [--cells lstm,ln_hyperlstm] [--hidden 1000] [--json times.json]

Every cell's float32 results are checked against its own float64 run first. The ratio to nn.LSTM is the
median over the rounds, in each of which all contenders run once. The cell hyperrnn_full runs only when it is
named.
"""

import argparse
import dataclasses
import sys

from rhhn_fairseq.cli import run


def main(argv=None) -> None:
    from rhhn_fairseq import benchmark

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for spec in dataclasses.fields(benchmark.BenchConfig):
        kind = cell_names if spec.name == "cells" else spec.type
        shown = "all" if spec.name == "cells" else spec.default
        parser.add_argument(
            f"--{spec.name.replace('_', '-')}",
            type=kind,
            default=spec.default,
            help=f"{spec.metadata['help']} (default: {shown})",
        )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**benchmark.SMOKE)
    args = vars(parser.parse_args(argv))
    path = args.pop("json")
    del args["smoke"]

    config = benchmark.BenchConfig(**args)
    path = None if path is None else benchmark.check_json_path(path)
    report = benchmark.run(config)
    print(benchmark.render(report))
    if path is not None:
        benchmark.write_json(report, path)


def cell_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(run(main))
