"""Writes a directory of safetensors and JSON as a checkpoint of fairseq's.

Examples:
  %(prog)s my-model checkpoint.pt --data data-bin/ptb
"""

from rhhn_fairseq.commands.parsers import make_parser


def main(argv=None) -> None:
    parser = make_parser("import_model", __doc__)
    parser.add_argument("directory", help="of a character or handwriting model")
    parser.add_argument("checkpoint", help="the file to write")
    parser.add_argument("--data", required=True, help="the data directory to name in it")
    args = parser.parse_args(argv)

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.importing import to_checkpoint

    to_checkpoint(args.directory, args.checkpoint, args.data)
