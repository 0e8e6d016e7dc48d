"""``rhhn plot PICTURE``: draws pictures of training runs and trained networks."""

import inspect
import os
import sys

from rhhn_fairseq.cli.character_models import add_model, add_text, check_model, given_text, load
from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.compat.names import complete_name
from rhhn_fairseq.errors import UsageError, nearest

MOST_LINES = 200


def main(argv=None) -> None:
    """Passes the arguments to the function that draws the picture.

    Raises:
        UsageError: no picture is named, or no function draws it.
    """
    argv = sys.argv[1:] if argv is None else argv
    complete_name(argv, PICTURES, skip=1)
    if argv and argv[0] in ("-h", "--help"):
        width = max(map(len, PICTURES))
        print("usage: rhhn plot PICTURE ...    (rhhn plot PICTURE --help: its options)\n")
        print("\n".join(f"  {picture:{width}}  {text}" for picture, (_, text) in PICTURES.items()))
        return
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"rhhn plot: name the picture first, one of {', '.join(PICTURES)}")
    if argv[0] not in PICTURES:
        raise UsageError(f"rhhn plot {argv[0]}: no such picture, {nearest(argv[0], PICTURES)}")
    draw, _ = PICTURES[argv[0]]
    parser = make_parser(f"plot {argv[0]}", inspect.getdoc(draw))
    if draw not in (curves, weights):
        text = "picture, PNG or SVG; its arrays go beside it as .npz"
        parser.add_argument("--output", required=True, metavar="FILE", help=text)
    if draw is not strokes:
        parser.add_argument("--title", help="title of the picture")
    draw(parser, argv[1:])


def _save(figure, output: str, arrays, file=None) -> None:
    from rhhn_fairseq.inspection.plotting import save

    save(figure, output, arrays)
    _say_written(output, file)


def _say_written(output: str, file=None) -> None:
    print(f"written: {output} and {os.path.splitext(output)[0]}.npz", file=file)


def _each(paths: list[str]):
    """Yields the paths, and shows on a terminal how many have been read."""
    from tqdm import tqdm

    return tqdm(paths, desc="reading", unit="checkpoint", disable=None, leave=False)


def curves(parser, argv) -> None:
    """Draws a metric of several trainings over their updates, and prints its best and last values as a table.

    Usage: %(prog)s runs/lstm_s1.log runs/lstm_s2.log runs/h_detach_s1.log \\
               --metric accuracy --output copying.png

    Each file is the output of one fairseq-train in any --log-format, and its name is the run's. Runs whose
    names differ only in a seed at the end (_s1, -seed2) are one line in a band, with a common line in the
    table.
    """
    from rhhn_fairseq.inspection import curves as measured

    add = parser.add_argument
    add("logs", nargs="+", metavar="LOG", help="output of fairseq-train")
    preferred = ", ".join(measured.PREFERRED)
    add("--metric", help=f"name of the figure (default: the first found of {preferred})")
    add("--subsets", default="valid", help="subsets, such as valid,train_inner (default: %(default)s)")
    add("--x", choices=measured.AXES, default="updates", help="the x axis (default: %(default)s)")
    text = "picture of the curves, PNG or SVG; its arrays go beside it as .npz"
    add("--output", "--png", metavar="FILE", help=text)
    add("--table", metavar="FILE", help="write a table there, as Markdown")
    add("--better", choices=("max", "min"), help="which value is the best (default: by the metric's name)")
    add("--threshold", type=float, metavar="VALUE", help="draw a line there, and say when it was reached")
    add("--log-scale", action="store_true", help="logarithmic axis for the metric")
    args = parser.parse_args(argv)

    from rhhn_fairseq.files import check_output, replace_file
    from rhhn_fairseq.inspection import pictures, plotting

    subsets = [name for name in args.subsets.split(",") if name]
    plotting.check_picture("--output", args.output, (*args.logs, args.table))
    check_output("--table", args.table, args.logs)
    metric = args.metric or measured.choose_metric(args.logs, subsets)
    read = measured.read_curves(args.logs, metric, subsets, args.x)
    table = measured.table(read, metric, args.better or measured.default_better(metric), args.threshold)
    if args.table is not None:
        with replace_file(args.table) as file:
            file.write(table.encode("utf-8"))
    print(table, end="")
    if args.output is not None:
        figure = pictures.draw_curves(read, metric, args.title, args.threshold, args.log_scale, args.x)
        _save(figure, args.output, measured.curve_arrays(read, metric, args.x), sys.stderr)


def weights(parser, argv) -> None:
    """Draws how much the weights of a character model change at each symbol of a text.

    Usage: %(prog)s checkpoints/checkpoint_best.pt --file page.txt --output weights.html
           %(prog)s --pretrained --text "def main(argv):" --output weights.png

    The measure is the L2 norm of the difference between a recurrent matrix, as the hypernetwork scales it, in
    this step and in the step before (Ha, Dai, Le 2016, figure 3). A page (.html) shows the numbers of each
    symbol, the probabilities of the next symbol, and the one that followed. `rhhn sample --weights` draws
    this for a text that the model samples.
    """
    add_model(parser)
    add_text(parser)
    text = "page (.html) or picture (.png, .svg); its arrays go beside it as .npz"
    parser.add_argument("--output", required=True, metavar="FILE", help=text)
    args = parser.parse_args(argv)
    check_model(args)

    from rhhn_fairseq.data.text.words import prompt_indices
    from rhhn_fairseq.inspection.pictures import TITLE, save_reading
    from rhhn_fairseq.inspection.plotting import check_picture
    from rhhn_fairseq.inspection.weights import read_text

    check_picture("--output", args.output, (args.checkpoint, args.file), page=True)
    text = given_text(args)
    model, vocabulary = load(args.checkpoint, args.data)
    reading = read_text(model, vocabulary, prompt_indices(vocabulary, text, args.file or "--text"))
    save_reading(reading, args.output, args.title or TITLE)
    _say_written(args.output)


def gradients(parser, argv) -> None:
    """Draws how the gradient of the last step's loss reaches the states of the steps before it.

    Usage: %(prog)s lstm/checkpoint_last.pt rhn/checkpoint_last.pt --initial --output gradients.png
           %(prog)s lstm/checkpoint_last.pt --h-detach 0.5 --shares --output shares.png

    The left panel shows the norm of dLoss / d state over time, averaged over the layers. The right panel
    shows it for each layer, or depth of a recurrent highway network, averaged over time (Suarez 2017, figures
    4 to 6). --shares adds, for cells with a state (h, c), how much of the gradient of c_t comes through h_t
    and not through c_{t+1}.
    """
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoints of character language models")
    add("--data", help="data directory of the models (default: that of their training)")
    add("--initial", action="store_true", help="also draw the models as they were before training")
    add("--steps", type=int, default=100, help="steps T of the sequences (default: %(default)s)")
    add("--lines", type=int, default=32, help="lines of the validation text (default: %(default)s)")
    add("--h-detach", type=float, default=0.0, metavar="P", help="probability of h-detach (default: 0)")
    text = "draws of h-detach's coins to average over (default: %(default)s)"
    add("--draws", type=int, default=8, help=text)
    add("--shares", action="store_true", help="draw how much of the gradient comes through h")
    add("--seed", type=int, default=1, help="seed of coins and initial models (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, low in (("steps", 2), ("lines", 1), ("draws", 1), ("seed", 0)):
        if getattr(args, name) < low:
            raise UsageError(f"--{name} {getattr(args, name)} is too small, the smallest is {low}")
    if not 0 <= args.h_detach <= 1:
        raise UsageError(f"--h-detach {args.h_detach} is no probability")

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.inspection import pictures, plotting
    from rhhn_fairseq.inspection.curves import run_names
    from rhhn_fairseq.inspection.gradients import Flow, gradient_arrays, gradient_flow
    from rhhn_fairseq.models.loading import initial_char_lm, lines_of, load_char_lm

    plotting.check_picture("--output", args.output, args.checkpoints)
    flows, names = [], dict(zip(args.checkpoints, run_names(args.checkpoints), strict=True))
    for path in _each(args.checkpoints):
        model, task = load_char_lm(path, args.data)
        if model.stack.backward_cells:
            raise UsageError(f"{path}: reads in both directions, so no step is the last")
        if args.h_detach and not hasattr(model.stack.cells[0].config, "h_detach"):
            raise UsageError(f"--h-detach {args.h_detach} has no effect on {path}, whose gates read no state")
        tokens = lines_of(task, "valid", args.lines, args.steps + 1)
        stages = [(names[path], model, False)]
        if args.initial:
            first = initial_char_lm(path, args.data, args.seed)
            stages.insert(0, (f"{names[path]}, initial", first, True))
        for run, network, initial in stages:
            measured = gradient_flow(network, tokens, args.h_detach, args.draws, args.seed)
            flows.append(Flow(run, *measured, initial))
    if args.shares and not any(len(flow.share_of_h) for flow in flows):
        raise UsageError("--shares: no model has a state (h, c) without --zoneout-c")
    _save(pictures.draw_gradients(flows, args.shares, args.title), args.output, gradient_arrays(flows))


def norms(parser, argv) -> None:
    """Draws the L2 norm of every block of weights of one or several models, raw and by their number.

    Usage: %(prog)s checkpoints/hyperrhn/checkpoint_best.pt --output norms.png
           %(prog)s runs/rhn/checkpoint_1_100.pt runs/rhn/checkpoint_last.pt --match weight_s --output b.svg

    Any checkpoint of fairseq's can be drawn, and directories of `rhhn convert` (Suarez 2017, figures 2
    and 3).
    """
    text = "checkpoint, or a directory of `rhhn convert`"
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=text)
    parser.add_argument("--match", default="", metavar="TEXT", help="only blocks whose names contain this")
    args = parser.parse_args(argv)

    import rhhn_fairseq.plugin  # noqa: F401  (what a checkpoint may hold)
    from rhhn_fairseq.inspection import pictures, plotting
    from rhhn_fairseq.inspection.blocks import norm_arrays, weight_blocks
    from rhhn_fairseq.inspection.curves import run_names
    from rhhn_fairseq.models.loading import load_weights

    plotting.check_picture("--output", args.output, args.checkpoints)
    runs = {}
    for name, path in zip(run_names(args.checkpoints), args.checkpoints, strict=True):
        runs[name] = [block for block in weight_blocks(load_weights(path)) if args.match in block.name]
        if not runs[name]:
            raise UsageError(f"--match {args.match}: no matrix of {path} has this in its name")
    _save(pictures.draw_norms(runs, args.title), args.output, norm_arrays(runs))


def attention(parser, argv) -> None:
    """Draws which source words a translation model attends to for each word of its translation.

    Usage: %(prog)s checkpoints/lstm_gnmt_small/checkpoint_best.pt \\
               --text "A man in an orange hat starring at something." --output attention.png

    The sentence is translated by beam search, and the attention is that of the best translation.
    """
    from rhhn_fairseq.cli.translate import add_data

    parser.add_argument("checkpoint", help="checkpoint of a translation model")
    parser.add_argument("--text", required=True, help="the sentence to translate")
    add_data(parser)
    parser.add_argument("--beam", type=int, default=5, help="width of the beam (default: %(default)s)")
    args = parser.parse_args(argv)

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.cli.translate import SearchConfig, Translator
    from rhhn_fairseq.inspection import pictures, plotting
    from rhhn_fairseq.inspection.attention import MOST_WORDS, word_attention
    from rhhn_fairseq.models.loading import load_translation_models

    plotting.check_picture("--output", args.output, [args.checkpoint])
    loaded = load_translation_models([args.checkpoint], args.data, args.sentencepiece_model)
    translation, seen = Translator(loaded, SearchConfig(beam=args.beam)).attend(args.text)
    source, target, shares = word_attention(seen)
    if max(len(source), len(target)) > MOST_WORDS:
        raise UsageError(
            f"--text has {len(source)} words, its translation {len(target)}; a picture may have {MOST_WORDS}"
        )
    arrays = {"source": source, "target": target, "weights": shares, "weights_of_pieces": seen.weights}
    arrays |= {"source_pieces": seen.source, "target_pieces": seen.target}
    print(translation.text)
    _save(pictures.draw_attention(seen, args.title), args.output, arrays)


def strokes(parser, argv) -> None:
    """Draws lines of prepared handwriting with their texts, to inspect them before training.

    Usage: %(prog)s data-bin/hershey --output lines.png
           %(prog)s data-bin/kanji --split valid --lines 24 --columns 6 --seed 2 --output kanji.svg

    The lines are chosen at random, and drawn at one scale. Their numbers are those that
    `rhhn write --prime SPLIT:NUMBER` takes.
    """
    add = parser.add_argument
    add("data", help="directory of prepared handwriting")
    add("--split", default="train", help="split to draw from (default: %(default)s)")
    add("--lines", type=int, default=12, help="how many lines (default: %(default)s)")
    add("--columns", type=int, default=3, help="lines side by side (default: %(default)s)")
    add("--seed", type=int, default=1, help="seed of the choice of lines (default: %(default)s)")
    args = parser.parse_args(argv)

    import numpy as np

    from rhhn_fairseq.data.strokes.store import StrokeSplit
    from rhhn_fairseq.generate.picture import MOST_COLUMNS, stroke_grid
    from rhhn_fairseq.inspection.plotting import check_picture

    for option, high in (("lines", MOST_LINES), ("columns", MOST_COLUMNS)):
        if not 1 <= getattr(args, option) <= high:
            raise UsageError(f"--{option} {getattr(args, option)}: choose from 1 to {high}")
    check_picture("--output", args.output)
    split = StrokeSplit(args.data, args.split)
    numbers = sorted(np.random.default_rng(args.seed).permutation(len(split))[: args.lines].tolist())
    arrays = {f"{args.split}:{number}": split.points(number) for number in numbers}
    _save(stroke_grid(split, args.split, numbers, args.columns), args.output, arrays)


def rank(parser, argv) -> None:
    """Draws how many directions a hypernetwork's vectors use, along one or several trainings.

    Usage: %(prog)s runs/paper/checkpoint_*.pt runs/broken/checkpoint_*.pt --output rank.png

    The files of one directory form one curve over their updates. Each model reads the same text. The figure
    is the effective rank (Roy and Vetterli 2007) of the embeddings z, or of the scaling vectors d, minus
    their mean over the text. With --hyper-init paper all elements of an embedding stay equal, and the rank
    is 1.
    """
    add = parser.add_argument
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help="checkpoints of character language models")
    add("--data", help="data directory of the models (default: that of their training)")
    add_text(parser, required=False)
    text = "symbols of the validation text to read, without --text (default: 500)"
    add("--symbols", type=int, default=500, help=text)
    args = parser.parse_args(argv)

    import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
    from rhhn_fairseq.inspection import pictures, plotting
    from rhhn_fairseq.inspection.curves import run_names
    from rhhn_fairseq.inspection.rank import rank_arrays, rank_of, table
    from rhhn_fairseq.inspection.tracing import check_length, trace
    from rhhn_fairseq.models.loading import beginning_of, load_char_lm, updates_of

    plotting.check_picture("--output", args.output, args.checkpoints)
    check_length(args.symbols)
    text = None if args.text is None and args.file is None else given_text(args)
    folders = list(dict.fromkeys(os.path.dirname(path) or "." for path in args.checkpoints))
    names, ranks = dict(zip(folders, run_names(folders), strict=True)), []
    for path in _each(args.checkpoints):
        model, task = load_char_lm(path, args.data)
        entries = task.encode_prompt(text) if text else beginning_of(task, "valid", args.symbols)
        run = names[os.path.dirname(path) or "."]
        ranks.append(rank_of(run, updates_of(path), trace(model, entries)[0]))
    figure = pictures.draw_ranks(ranks, args.title)
    print(table(ranks), end="")
    _save(figure, args.output, rank_arrays(ranks))


PICTURES = {
    "curves": (curves, "metrics of trainings over updates, epochs or hours"),
    "weights": (weights, "how much the weights change while a character model reads a text"),
    "gradients": (gradients, "how the gradient of the last step's loss reaches the steps before it"),
    "norms": (norms, "the norm of every block of weights"),
    "attention": (attention, "which source words a translation looks at"),
    "strokes": (strokes, "lines of prepared handwriting with their texts"),
    "rank": (rank, "how many directions a hypernetwork uses, along a training"),
}
