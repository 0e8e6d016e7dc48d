"""Writes a character or handwriting model as safetensors and JSON, from a checkpoint of fairseq-train.

Usage: python scripts/export_model.py checkpoints/ln_hyperlstm_ptb/checkpoint_best.pt --output exported

The directory is what scripts/sample.py and scripts/write.py read in place of a checkpoint. They then need
neither fairseq nor the data.
"""

import argparse
import sys

from rhhn_fairseq.cli import run


def main(argv=None) -> None:
    args = parse_arguments(argv)

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.exporting import export

    network = export(args.checkpoint, args.output, args.data, args.dtype)
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"written: {args.output} ({count:,} weights, {args.dtype})")


def parse_arguments(argv):
    description, _, rest = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", help="checkpoint of a character or handwriting model")
    add("--output", required=True, metavar="DIR", help="where the two files go")
    add("--data", metavar="DIR", help="data of a character model (default: where it was trained)")
    add("--dtype", default="float16", help="of the stored weights: float16 (default) or float32")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run(main))
