"""Draws how the gradient of the last step's loss reaches the states of the steps before it.

Usage: %(prog)s lstm/checkpoint_last.pt rhn/checkpoint_last.pt --initial --output gradients.png
       %(prog)s lstm/checkpoint_last.pt --h-detach 0.5 --shares --output shares.png

The left panel shows the norm of dLoss / d state over time, averaged over the layers. The right panel shows it
for each layer, or depth of a recurrent highway network, averaged over time (Suarez 2017, figures 4 to 6).
--shares adds, for cells with a state (h, c), how much of the gradient of c_t comes through h_t and not
through c_{t+1}.
"""

import os

from rhhn_fairseq.cli.parsers import picture_parser
from rhhn_fairseq.errors import UsageError


def main(argv=None) -> None:
    parser = picture_parser("gradients", __doc__)
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoints of character language models")
    add("--data", help="data directory of the models (default: that of their training)")
    add("--initial", action="store_true", help="also draw the models as they were before training")
    add("--steps", type=int, default=100, help="steps T of the sequences (default: %(default)s)")
    add("--lines", type=int, default=32, help="lines of the validation text (default: %(default)s)")
    add("--h-detach", type=float, default=0.0, metavar="P", help="probability of h-detach (default: 0)")
    add(
        "--draws",
        type=int,
        default=8,
        help="draws of h-detach's coins to average over (default: %(default)s)",
    )
    add("--shares", action="store_true", help="draw how much of the gradient comes through h")
    add("--seed", type=int, default=1, help="seed of coins and initial models (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, low in (("steps", 2), ("lines", 1), ("draws", 1), ("seed", 0)):
        if getattr(args, name) < low:
            raise UsageError(f"--{name} {getattr(args, name)} is too small, the smallest is {low}")
    if not 0 <= args.h_detach <= 1:
        raise UsageError(f"--h-detach {args.h_detach} is no probability")

    from rhhn_fairseq.inspection import plotting
    from rhhn_fairseq.inspection.curves import run_names
    from rhhn_fairseq.inspection.gradient_picture import draw_gradients, gradient_arrays
    from rhhn_fairseq.inspection.gradients import Flow, gradient_flow

    plotting.check_picture("--output", args.output, args.checkpoints)

    from tqdm import tqdm

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.models.loading import initial_char_lm, lines_of, load_char_lm

    flows = []
    names = zip(run_names(args.checkpoints), args.checkpoints, strict=True)
    for name, path in tqdm(list(names), desc="reading", unit="checkpoint", disable=None, leave=False):
        model, task = load_char_lm(path, args.data)
        if model.stack.backward_cells:
            raise UsageError(f"{path}: reads in both directions, so no step is the last")
        tokens = lines_of(task, "valid", args.lines, args.steps + 1)
        stages = [(name, model, False)]
        if args.initial:
            first = initial_char_lm(path, args.data, args.seed)
            stages.insert(0, (f"{name}, initial", first, True))
        for run, network, initial in stages:
            measured = gradient_flow(network, tokens, args.h_detach, args.draws, args.seed)
            flows.append(Flow(run, *measured, initial))
    plotting.save(draw_gradients(flows, args.shares, args.title), args.output, gradient_arrays(flows))
    print(f"written: {args.output} and {os.path.splitext(args.output)[0]}.npz")
