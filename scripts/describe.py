"""Prints the layers, shapes and parameter count of an architecture, beside the paper's count.

Usage: python scripts/describe.py --arch ln_hyperlstm_ptb [--vocab-size 50] [--backends]
"""

import argparse
import sys

from rhhn_fairseq.cli import run


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True, help="name of an architecture, as fairseq-train takes it")
    parser.add_argument("--vocab-size", type=int, help="number of symbols (default: the paper's corpus)")
    parser.add_argument(
        "--backends", action="store_true", help="print which backend runs the cells, and why not the others"
    )
    args = parser.parse_args(argv)

    import rhhn_fairseq.plugin  # noqa: F401  (registers the architectures)
    from rhhn_fairseq.describe import describe, describe_backends

    print(describe(args.arch, args.vocab_size))
    if args.backends:
        print(describe_backends(args.arch, args.vocab_size))


if __name__ == "__main__":
    sys.exit(run(main))
