"""Draws the L2 norm of every block of weights, raw and by the number of weights, of one or several models.

Usage: %(prog)s checkpoints/hyperrhn/checkpoint_best.pt --output norms.png
       %(prog)s runs/rhn/checkpoint_1_100.pt runs/rhn/checkpoint_last.pt --match weight_s --output norms.svg

Any checkpoint of fairseq's can be drawn, and directories of `rhhn convert` (Suarez 2017, figures 2 and 3).
"""

import os

from rhhn_fairseq.cli.parsers import picture_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    from rhhn_fairseq.inspection import norms, plotting
    from rhhn_fairseq.inspection.blocks import weight_blocks
    from rhhn_fairseq.inspection.curves import run_names

    parser = picture_parser("norms", __doc__)
    parser.add_argument(
        "checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoint, or a directory of `rhhn convert`"
    )
    parser.add_argument("--match", default="", metavar="TEXT", help="only blocks whose names contain this")
    args = parser.parse_args(argv)
    plotting.check_picture("--output", args.output, args.checkpoints)

    import rhhn_fairseq.plugin  # noqa: F401  (what a checkpoint may hold)
    from rhhn_fairseq.models.loading import load_weights

    runs = {}
    for name, path in zip(run_names(args.checkpoints), args.checkpoints, strict=True):
        runs[name] = [block for block in weight_blocks(load_weights(path)) if args.match in block.name]
        if not runs[name]:
            raise UsageError(f"--match {args.match}: no matrix of {path} has this in its name")
    plotting.save(norms.draw_norms(runs, args.title), args.output, norms.norm_arrays(runs))
    print(f"written: {args.output} and {os.path.splitext(args.output)[0]}.npz")
