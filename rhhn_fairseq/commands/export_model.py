"""Writes a character or handwriting model as safetensors and JSON, from a checkpoint of fairseq-train.

Usage: %(prog)s checkpoints/ln_hyperlstm_ptb/checkpoint_best.pt --output exported

The directory is what ``rhhn sample`` and ``rhhn write`` read in place of a checkpoint. They then need
neither fairseq nor the data.
"""

from rhhn_fairseq.commands.parsers import make_parser


def main(argv=None) -> None:
    args = parse_arguments(argv)

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.exporting import export

    network = export(args.checkpoint, args.output, args.data, args.dtype)
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"written: {args.output} ({count:,} weights, {args.dtype})")


def parse_arguments(argv):
    parser = make_parser("export_model", __doc__)
    add = parser.add_argument
    add("checkpoint", help="checkpoint of a character or handwriting model")
    add("--output", required=True, metavar="DIR", help="where the two files go")
    add("--data", metavar="DIR", help="data of a character model (default: where it was trained)")
    add("--dtype", default="float16", help="of the stored weights: float16 (default) or float32")
    return parser.parse_args(argv)
