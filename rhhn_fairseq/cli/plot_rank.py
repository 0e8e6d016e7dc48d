"""Draws how many directions a hypernetwork's vectors use, along one or several trainings.

Usage: %(prog)s runs/paper/checkpoint_*.pt runs/broken/checkpoint_*.pt --output rank.png

The files of one directory form one curve over their updates. Each model reads the same text. The figure is
the effective rank (Roy and Vetterli 2007) of the embeddings z, or of the scaling vectors d, minus their mean
over the text. With --hyper-init paper all elements of an embedding stay equal, and the rank is 1.
"""

import os
from pathlib import Path

from rhhn_fairseq.cli.character_models import add_text, given_text
from rhhn_fairseq.cli.parsers import picture_parser


def main(argv=None) -> None:
    parser = picture_parser("rank", __doc__)
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoints of character language models")
    add("--data", help="data directory of the models (default: that of their training)")
    add_text(parser, required=False)
    add(
        "--symbols",
        type=int,
        default=500,
        help="symbols of the validation text to read, without --text (default: 500)",
    )
    args = parser.parse_args(argv)

    from rhhn_fairseq.inspection import plotting, rank
    from rhhn_fairseq.inspection.curves import run_names
    from rhhn_fairseq.inspection.tracing import check_length, trace

    plotting.check_picture("--output", args.output, args.checkpoints)
    check_length(args.symbols)
    text = None if args.text is None and args.file is None else given_text(args)

    from tqdm import tqdm

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.models.loading import beginning_of, load_char_lm, updates_of

    # Reports checkpoints that are given twice before any is read.
    run_names(args.checkpoints)
    folders = list(dict.fromkeys(os.path.dirname(path) or "." for path in args.checkpoints))
    names = dict(zip(folders, run_names(folders), strict=True))
    ranks = []
    for path in tqdm(args.checkpoints, desc="reading", unit="checkpoint", disable=None, leave=False):
        model, task = load_char_lm(path, args.data)
        entries = task.encode_prompt(text) if text else beginning_of(task, "valid", args.symbols)
        run = names[os.path.dirname(path) or "."]
        ranks.append(rank.rank_of(run, updates_of(path), trace(model, entries)[0]))
    plotting.save(rank.draw_ranks(ranks, args.title), args.output, rank.rank_arrays(ranks))
    print(table(ranks), end="")
    print(f"written: {args.output} and {Path(args.output).with_suffix('.npz')}")


def table(ranks) -> str:
    """Returns a table of the ranks, one model per line."""
    from rhhn_fairseq.inspection.rank import by_run

    kinds = sorted({kind for each in ranks for kind in each.ranks}, reverse=True)
    rows = [["run", "updates", *(f"rank of {kind}" for kind in kinds)], ["---"] * (2 + len(kinds))]
    for each in [each for members in by_run(ranks).values() for each in members]:
        values = (
            f"{each.ranks[kind]:.2f} of {each.widths[kind]}" if kind in each.ranks else "" for kind in kinds
        )
        rows.append([each.run, f"{each.updates:,}", *values])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
