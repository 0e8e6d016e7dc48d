"""Times translation models in training and in beam search, beside fairseq's own lstm.

Usage: python scripts/bench_translation.py [--archs lstm_gnmt_small,hyperlstm_gnmt_small] [--json times.json]

Weights are random and sentences have one length, so every model does the same number of steps. The ratio to
fairseq's lstm is the median over the rounds, in each of which all models run once.
"""

import argparse
import dataclasses
import sys

from rhhn_fairseq.cli import run


def main(argv=None) -> None:
    import rhhn_fairseq.plugin  # noqa: F401
    from rhhn_fairseq import benchmark_translation as bench
    from rhhn_fairseq.benchmark import check_json_path, write_json

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for spec in dataclasses.fields(bench.TranslationBenchConfig):
        kind = names if spec.name == "archs" else spec.type
        shown = ",".join(spec.default) if spec.name == "archs" else spec.default
        parser.add_argument(
            f"--{spec.name.replace('_', '-')}",
            type=kind,
            default=spec.default,
            help=f"{spec.metadata['help']} (default: {shown})",
        )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**bench.SMOKE)
    args = vars(parser.parse_args(argv))
    path = args.pop("json")
    del args["smoke"]

    config = bench.TranslationBenchConfig(**args)
    path = None if path is None else check_json_path(path)
    report = bench.run(config)
    print(bench.render(report))
    if path is not None:
        write_json(report, path)


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(run(main))
