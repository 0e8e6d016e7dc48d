"""The pictures: of training curves, gradients, norms and ranks, attention, and the changes of weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import replace_file
from rhhn_fairseq.inspection.attention import Attention, word_attention
from rhhn_fairseq.inspection.blocks import Block, block_label
from rhhn_fairseq.inspection.colours import colour_limit
from rhhn_fairseq.inspection.curves import Curve, grouped
from rhhn_fairseq.inspection.gradients import Flow
from rhhn_fairseq.inspection.plotting import (
    COLOUR_MAP,
    COLOURS,
    FEW_POINTS,
    LINE_STYLES,
    MARKERS,
    WIDTH,
    Figure,
    MaxNLocator,
    add_colour_bar,
    add_legend,
    colour_of,
    literal,
    new_figure,
    save,
    save_arrays,
    styled,
    with_thousands,
)
from rhhn_fairseq.inspection.rank import KINDS, Rank, by_run
from rhhn_fairseq.inspection.weights import Reading, weight_page

UNITS = {
    "accuracy": "accuracy (%)",
    "bleu": "BLEU",
    "bpc": "bits per character",
    "gnorm": "norm of the gradient",
    "loss": "loss (in the unit of the log)",
    "mse": "mean squared error",
    "nats_seq": "nats per sequence",
    "ppl": "perplexity",
}

# Of a heat map: characters of a word that are shown, and inches that its title takes.
LONGEST, NARROWEST = 20, 3.9
COLUMNS = 76
# A taller picture is not readable; the HTML page is.
MOST_LINES = 60
# Height of a line of text above the strips, in rows of the strips.
TEXT_ROWS = 2
INCHES_A_ROW = 0.13
VISIBLE = {"\n": "↵", "\t": "→", "\r": "␍"}


def band(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean and range of the curves of several seeds, over the range that all of them cover.

    Returns:
        positions on the axis where any curve has a value, and the mean, minimum and maximum there; values
        between a curve's own points are interpolated. Empty if the curves do not overlap.
    """
    start, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.unique([place for curve in curves for place in curve.x if start <= place <= end])
    if not len(x):
        return x, x, x, x
    values = np.array([np.interp(x, curve.x, curve.values) for curve in curves])
    return x, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


@styled()
def draw_curves(
    curves: list[Curve],
    metric: str,
    title: str | None = None,
    threshold: float | None = None,
    log_scale: bool = False,
    axis: str = "updates",
) -> Figure:
    """Draws the curves over updates, epochs or hours.

    Runs of one group, which differ in their seed, are drawn as their mean in a band from the lowest to the
    highest; if they do not overlap, each run has its own line with its own markers.

    Args:
        threshold: draws a labelled line at this value. log_scale: of the metric's axis.
        axis: one of ``curves.AXES``, with which the curves were read.
    """
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    subsets = list(dict.fromkeys(curve.subset for curve in curves))
    groups = list(dict.fromkeys(curve.group for curve in curves))
    banded = False
    for (group, subset), members in grouped(curves).items():
        label = group if len(subsets) == 1 else f"{group}, {subset}"
        number = groups.index(group)
        # When the colours repeat, the line style changes.
        style = subsets.index(subset) + number // len(COLOURS) * len(subsets)
        look = {"color": colour_of(number), "linestyle": LINE_STYLES[style % len(LINE_STYLES)]}
        x, mean, low, high = band(members)
        if len(members) > 1 and len(x) > 1:
            _line(axes, x, mean, f"{label} ({len(members)} runs)", look)
            banded = True
            axes.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
            continue
        for number, curve in enumerate(members):
            name = label if len(members) == 1 else f"{label}, {curve.run}"
            _line(axes, curve.x, curve.values, name, look, MARKERS[number % len(MARKERS)])
    if threshold is not None:
        axes.axhline(threshold, color="0.35", linestyle=":", linewidth=1.2, label=f"threshold {threshold:g}")
        axes.annotate(
            f"{threshold:g}",
            (1.0, threshold),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color="0.35",
            annotation_clip=False,
        )
    if log_scale:
        axes.set_yscale("log")
    axes.set_xlabel({"hours": "hours since the start"}.get(axis, axis))
    if axis == "updates":
        with_thousands(axes.xaxis)
    unit = UNITS.get(metric, metric)
    axes.set_ylabel(unit if len(subsets) > 1 else f"{unit}, {subsets[0]}")
    axes.set_title(literal(title or f"{metric} during training"))
    note = "lines: mean of the runs; bands: from the lowest to the highest" if banded else None
    add_legend(figure, axes, note=note)
    return figure


def _line(axes, x, values, label: str, look: dict, marker: str = "o") -> None:
    """Draws a line, with a marker at each value if there are few."""
    shown = marker if len(x) <= FEW_POINTS else None
    axes.plot(x, values, marker=shown, markersize=4, label=literal(label), **look)


@styled()
def draw_gradients(flows: Sequence[Flow], shares: bool = False, title: str | None = None) -> Figure:
    """Draws norms over time and by layer; with ``shares`` also how much of the gradient of c comes through h.

    Norms of zero, beyond a cut by h-detach, are omitted, because the axis is logarithmic.
    """
    with_memory = [flow for flow in flows if len(flow.share_of_h)] if shares else []
    figure = new_figure(7.0 if with_memory else 4.4)
    if with_memory:
        panels = figure.subplot_mosaic([["outside", "within"], ["share", "share"]], width_ratios=(2, 1))
    else:
        panels = figure.subplot_mosaic([["outside", "within"]], width_ratios=(2, 1))
    # A model with initial weights has the colour of the trained one, with a dashed line.
    bases = list(dict.fromkeys(flow.run.removesuffix(", initial") for flow in flows))
    for flow in flows:
        number = bases.index(flow.run.removesuffix(", initial"))
        look = {"color": colour_of(number), "linestyle": "--" if flow.initial else "-"}
        steps = np.arange(1, len(flow.norms) + 1)
        panels["outside"].plot(steps, _positive(flow.outside), label=literal(flow.run), **look)
        if flow in with_memory:
            panels["share"].plot(steps[:-1], 100 * flow.share_of_h, **look)
        layers = np.arange(1, len(flow.within) + 1)
        # A network of one layer has a marker, and no line that could be dashed.
        marks = {"marker": MARKERS[number % len(MARKERS)], "fillstyle": "none" if flow.initial else "full"}
        panels["within"].plot(layers, _positive(flow.within), markersize=5, **marks, **look)
    panels["outside"].set_title("outside the cell (mean over layers)", fontsize=10.5)
    panels["outside"].set_xlabel("step t; the loss is that of the last")
    panels["outside"].set_ylabel("norm of dLoss / d state")
    panels["within"].set_title("within (mean over time)", fontsize=10.5)
    panels["within"].set_xlabel("layer")
    panels["within"].set_xticks(range(1, max(len(flow.within) for flow in flows) + 1))
    for name in ("outside", "within"):
        panels[name].set_yscale("log")
    if with_memory:
        panels["share"].set_title("share of the gradient of c at step t that comes through h", fontsize=10.5)
        panels["share"].set_xlabel("step t")
        panels["share"].set_ylabel("percent")
        panels["share"].set_ylim(0, 100)
    figure.suptitle(literal(title or "Gradients of the last step's loss"), fontsize=12, fontweight="bold")
    add_legend(figure, panels["outside"])
    return figure


def _positive(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, np.nan)


@styled()
def draw_norms(runs: Mapping[str, Sequence[Block]], title: str | None = None) -> Figure:
    """Draws the norm of every block, and beside it the root mean square of its weights.

    Args:
        runs: the blocks of each checkpoint, by its name.
    """
    names = list(dict.fromkeys(block.name for blocks in runs.values() for block in blocks))
    figure = new_figure(1.5 + 0.24 * len(names))
    left, right = figure.subplots(1, 2, sharey=True)
    for number, (run, blocks) in enumerate(runs.items()):
        rows = [names.index(block.name) for block in blocks]
        # Hollow markers keep overlapping runs visible.
        look = {
            "color": colour_of(number),
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": "none",
            "fillstyle": "full" if number == 0 else "none",
            "clip_on": False,
        }
        left.plot([block.norm for block in blocks], rows, label=literal(run), **look)
        right.plot([block.root_mean_square for block in blocks], rows, **look)
    left.set_yticks(range(len(names)), [block_label(name) for name in names], family="monospace", fontsize=8)
    left.set_ylim(len(names) - 0.5, -0.5)
    left.set_xlabel("L2 norm of the block")
    right.set_xlabel("root mean square of its weights")
    for axes in (left, right):
        axes.set_xlim(left=0.0)
        # With more labels, the last of the left panel would touch the first of the right one.
        axes.xaxis.set_major_locator(MaxNLocator(5))
    right.tick_params(axis="y", length=0)
    figure.suptitle(literal(title or "Norms of the weights"), fontsize=12, fontweight="bold")
    add_legend(figure, left, columns=3)
    return figure


@styled()
def draw_ranks(ranks: Sequence[Rank], title: str | None = None) -> Figure:
    """Draws the effective ranks over the updates of training, with one panel for z and one for d."""
    kinds = [kind for kind in KINDS if any(kind in rank.ranks for rank in ranks)]
    figure = new_figure(4.2)
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        for number, (run, members) in enumerate(by_run(ranks).items()):
            drawn = [rank for rank in members if kind in rank.ranks]
            axes.plot(
                [rank.updates for rank in drawn],
                [rank.ranks[kind] for rank in drawn],
                color=colour_of(number),
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                label=literal(run),
            )
        widths = sorted({rank.widths[kind] for rank in ranks if kind in rank.widths})
        axes.set_title(f"{KINDS[kind]} ({', '.join(map(str, widths))} elements)", fontsize=10.5)
        highest = max(rank.ranks[kind] for rank in ranks if kind in rank.ranks)
        axes.set_ylim(0.0, 1.05 * (highest or 1.0))
        axes.set_xlabel("updates")
        with_thousands(axes.xaxis)
    panels[0].set_ylabel("effective rank of what changes")
    figure.suptitle(
        literal(title or "Directions in which a hypernetwork moves"), fontsize=12, fontweight="bold"
    )
    add_legend(figure, panels[0])
    return figure


@styled()
def draw_attention(attention: Attention, title: str | None = None) -> Figure:
    """Draws the weights as a heat map: a column per source word, a row per word of the translation."""
    source, target, weights = word_attention(attention)
    source, target = (
        [literal(word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…") for word in words]
        for words in (source, target)
    )
    # Words stand at an angle below, and to the left.
    below, left = (0.085 * max(map(len, words)) for words in (source, target))
    width = max(left + NARROWEST, min(WIDTH, 1.4 + left + 0.45 * len(source)))
    figure = new_figure(1.5 + 0.7 * below + 0.27 * len(target), width)
    axes = figure.add_subplot()
    axes.grid(False)
    image = axes.imshow(weights.T, aspect="auto", cmap=COLOUR_MAP, vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(source)), source, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(target)), target)
    axes.tick_params(length=0)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    axes.set_title(literal(title or "Attention of each word of the translation"), loc="left", fontsize=11)
    add_colour_bar(figure, axes, image, "share of the attention", extend="neither")
    return figure


def wrapped(symbols: tuple[str, ...], columns: int = COLUMNS) -> list[tuple[int, int]]:
    """Returns the lines of a text as ranges of symbols, broken after line ends and after ``columns`` symbols.

    The ends of empty lines are appended to the preceding line.
    """
    lines, start = [], 0
    for number, symbol in enumerate(symbols, start=1):
        ends = symbol == "\n" and symbols[number : number + 1] != ("\n",)
        if ends or number - start == columns or number == len(symbols):
            lines.append((start, number))
            start = number
    return lines


@styled()
def draw_weights(reading: Reading, title: str) -> Figure:
    """Draws the text in lines, and under each symbol how much each matrix changed when it was read.

    Raises:
        UsageError: the text is too long for a picture.
    """
    words = max(map(len, reading.symbols)) > 1
    columns = COLUMNS // 2 if words else COLUMNS
    lines = wrapped(reading.symbols, columns)
    if len(lines) > MOST_LINES:
        raise UsageError(
            f"the text takes {len(lines)} lines of {columns} symbols, a picture may have {MOST_LINES}; draw "
            "a page (.html) instead"
        )
    shown = [literal(VISIBLE.get(symbol, symbol)) for symbol in reading.symbols]
    # Words stand upright, two characters a row.
    above = 2 + max(map(len, shown)) // 2 if words else TEXT_ROWS
    place = {"rotation": 90, "va": "bottom"} if words else {"va": "center"}
    width, rows = max(end - start for start, end in lines), len(reading.names) + above
    table = np.full((rows * len(lines), max(width, 24)), np.nan)
    figure = new_figure(0.9 + INCHES_A_ROW * len(table))
    axes = figure.add_subplot()
    axes.grid(False)
    ticks, labels = [], []
    for number, (start, end) in enumerate(lines):
        top = number * rows + above
        table[top : top + len(reading.names), : end - start] = reading.changes[start:end].T
        for column, text in enumerate(shown[start:end]):
            axes.text(column, top - 1.05, text, ha="center", family="monospace", fontsize=8, **place)
        ticks += range(top, top + len(reading.names))
        labels += reading.names
    image = axes.imshow(
        table,
        aspect="auto",
        cmap=COLOUR_MAP,
        vmin=0.0,
        vmax=colour_limit(reading.changes),
        interpolation="nearest",
    )
    axes.set_yticks(ticks, labels, fontsize=6)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(literal(title))
    add_colour_bar(figure, axes, image, "L2 norm of a matrix's change, from one symbol to the next")
    return figure


TITLE = "Change of the recurrent weights as each symbol is read"


def save_reading(reading: Reading, path: str, title: str = TITLE) -> None:
    """Writes the page or the picture, and its arrays beside it as .npz."""
    if Path(path).suffix.lower() != ".html":
        save(draw_weights(reading, title), path, reading.arrays())
        return
    with replace_file(path) as file:
        file.write(weight_page(reading, title).encode("utf-8"))
    save_arrays(Path(path).with_suffix(".npz"), reading.arrays())
