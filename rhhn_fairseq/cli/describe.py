"""Prints the layers, shapes and parameter count of an architecture, beside the paper's count.

Usage: %(prog)s --arch ln_hyperlstm_ptb
       %(prog)s --arch ln_hyperlstm_ptb --backends --device cuda --dtype bfloat16
"""

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    parser = make_parser("describe", __doc__)
    parser.add_argument("--arch", required=True, help="name of an architecture, as fairseq-train takes it")
    parser.add_argument("--vocab-size", type=int, help="number of symbols (default: the paper's corpus)")
    parser.add_argument(
        "--backends", action="store_true", help="print which backend runs the cells, and why not the others"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="device for --backends (default: cpu)")
    dtypes = ("float32", "float64", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="type for --backends (default: float32)")
    args = parser.parse_args(argv)
    for option in ("device", "dtype"):
        if getattr(args, option) is not None and not args.backends:
            raise UsageError(f"--{option} {getattr(args, option)} goes with --backends")

    import torch

    import rhhn_fairseq.plugin  # noqa: F401  (registers the architectures)
    from rhhn_fairseq.cli.describing import describe, describe_backends

    print(describe(args.arch, args.vocab_size))
    if args.backends:
        dtype = getattr(torch, args.dtype or "float32")
        print(describe_backends(args.arch, args.vocab_size, args.device or "cpu", dtype))
