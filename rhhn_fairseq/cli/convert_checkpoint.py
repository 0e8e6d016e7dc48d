"""Converts a trained model: a checkpoint of fairseq's to safetensors and JSON, or back.

Usage: %(prog)s checkpoints/checkpoint_best.pt --output my-model
       %(prog)s my-model --data data-bin/ptb --output checkpoint.pt
       %(prog)s WEIGHTS --vocabulary FILE --data data-bin/ptb --output suarez.pt

A checkpoint becomes a directory with the character or handwriting model: ``rhhn sample``, ``rhhn write`` and
rhhn_fairseq.nn.from_pretrained read it, and need neither fairseq nor the data.

A directory becomes a checkpoint, for fairseq-eval-lm and fairseq-train --finetune-from-model.

With --vocabulary, WEIGHTS is a state dict of jsuarez5341/Recurrent-Highway-Hypernetworks-NIPS (Suarez 2017),
FILE the dictionary from characters to indices beside it. No code in either is run.
"""

import os

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    args = parse_arguments(argv)
    is_directory = os.path.isdir(args.source)
    _check(args, is_directory)

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.cli import author_weights, averaging, conversion
    from rhhn_fairseq.files import check_output
    from rhhn_fairseq.saving import DTYPES

    if is_directory or args.vocabulary is not None:
        check_output("--output", args.output, [args.source, args.vocabulary])
        if is_directory:
            checkpoint = conversion.to_checkpoint(args.source, args.data)
        else:
            checkpoint = author_weights.convert(args.source, args.vocabulary, args.data)
        averaging.save(checkpoint, args.output)
        name, weights = checkpoint["cfg"]["model"]["_name"], checkpoint["model"]
    else:
        dtype = DTYPES[args.dtype] if args.dtype else None
        network = conversion.to_directory(args.source, args.output, args.data, dtype)
        name, weights = network.kind, network.state_dict()
    count = sum(weight.numel() for weight in weights.values() if weight.is_floating_point())
    print(f"converted: {name}, {count:,} weights")
    print(f"written: {args.output}")


def _check(args, is_directory: bool) -> None:
    """Raises UsageError for options that do not apply to the conversion, or that it lacks."""
    if not args.output:
        raise UsageError("--output is empty, name a file or directory")
    if is_directory and args.vocabulary is not None:
        raise UsageError(f"--vocabulary goes with the author's weights, and {args.source} is a directory")
    to_checkpoint = is_directory or args.vocabulary is not None
    if to_checkpoint and args.data is None:
        raise UsageError(f"--data is missing: the data directory that {args.output} is for")
    if to_checkpoint and args.dtype is not None:
        raise UsageError(f"--dtype {args.dtype} is for a directory of safetensors; checkpoints are float32")


def parse_arguments(argv):
    parser = make_parser("convert", __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="checkpoint, directory of safetensors, or the author's state dict")
    add("--output", required=True, metavar="PATH", help="the directory or checkpoint to write")
    add("--data", metavar="DIR", help="data directory (default for a checkpoint: that of its training)")
    add("--vocabulary", metavar="FILE", help="the author's dictionary of characters")
    add(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="type of the weights in the directory (default: unchanged)",
    )
    return parser.parse_args(argv)
