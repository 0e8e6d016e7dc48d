"""Converts the HyperRHN and RHN checkpoints of Suarez 2017 into checkpoints of this project.

Usage: %(prog)s WEIGHTS --vocabulary FILE --data data-bin/ptb --output suarez.pt

WEIGHTS is a state dict of jsuarez5341/Recurrent-Highway-Hypernetworks-NIPS, FILE the dictionary from
characters to indices that lies beside it. No code of either runs. The result is a checkpoint for
fairseq-eval-lm and ``rhhn sample``, and for fairseq-train --finetune-from-model.
"""

from rhhn_fairseq.commands.parsers import make_parser


def main(argv=None) -> None:
    args = parse_arguments(argv)

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq import averaging, conversion
    from rhhn_fairseq.lines import check_output

    check_output("--output", args.output, [args.weights, args.vocabulary])
    checkpoint = conversion.convert(args.weights, args.vocabulary, args.data)
    averaging.save(checkpoint, args.output)
    count = sum(weight.numel() for weight in checkpoint["model"].values() if weight.is_floating_point())
    print(f"converted: {checkpoint['cfg']['model']['_name']}, {count:,} weights")
    print(f"written: {args.output}")


def parse_arguments(argv):
    parser = make_parser("convert_checkpoint", __doc__)
    add = parser.add_argument
    add("weights", metavar="WEIGHTS", help="the author's state dict")
    add("--vocabulary", required=True, metavar="FILE", help="the author's dictionary of characters")
    add("--data", required=True, metavar="DIR", help="PTB as `rhhn prepare ptb` makes it")
    add("--output", required=True, metavar="FILE", help="the checkpoint to write")
    return parser.parse_args(argv)
