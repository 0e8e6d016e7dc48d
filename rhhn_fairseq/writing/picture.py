"""Pictures of written lines: strokes with the pen lifted where it was, and the change of weights under
them."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.strokes.points import to_strokes
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.lines import replacing
from rhhn_fairseq.writing.sampling import Written

with needed_for("pictures of writing need"):
    from matplotlib import rc_context
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")

# Inches, and what a line of writing gets around it.
WIDTH, MARGIN, GAP, STRIP = 10.0, 0.35, 0.25, 0.11
TALLEST = 6.0
DOTS_PER_INCH = 120
COLUMNS = 600

INK, PRIMED, COLOURS = "black", "tab:blue", "YlOrRd"


def output_paths(output: str | Path) -> list[Path]:
    """The files of a picture: ``output`` itself where it ends in .svg or .png, else both endings after it.

    Raises:
        UsageError: it lies in no folder that exists.
    """
    output = Path(output)
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    if output.suffix[1:] in FORMATS:
        return [output]
    return [output.with_name(f"{output.name}.{kind}") for kind in FORMATS]


def column_changes(line: Written, columns: int = COLUMNS) -> np.ndarray:
    """The largest change of each matrix [M, columns] while the pen was over each column of the line's width.

    The pen's way counts whether it touches or not; where it never was, the change is 0.
    """
    x = np.cumsum(line.points[:, 0])
    low, high = x.min(), x.max()
    place = np.zeros(len(x), dtype=int)
    if high > low:
        place = np.minimum(((x - low) / (high - low) * columns).astype(int), columns - 1)
    changes = np.zeros((line.changes.shape[1], columns))
    for step in range(1, len(x)):
        first, last = sorted(place[step - 1 : step + 1])
        under = changes[:, first : last + 1]
        np.maximum(under, line.changes[step][:, None], out=under)
    return changes


def draw(lines: Sequence[Written], paths: Sequence[Path], changes: bool = True, columns: int = 1) -> None:
    """Draws lines one under the other, or row by row in columns, all at one scale.

    Args:
        changes: whether the change of the weights is shown: together as the colour behind a line, and matrix
            by matrix in strips under it. Models whose weights do not change have nothing to show.

    Raises:
        UsageError: a file cannot be written.
    """
    figure = _figure(lines, changes and bool(lines[0].names), columns)
    for path in paths:
        kind = path.suffix[1:]
        content = io.BytesIO()
        # Without a date and with names that do not depend on chance, equal pictures are equal files.
        with rc_context({"svg.hashsalt": "rhhn_fairseq"}):
            metadata = {"Date": None} if kind == "svg" else None
            figure.savefig(content, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
        with replacing(path) as file:
            file.write(content.getvalue())


def _figure(lines: Sequence[Written], changes: bool, columns: int) -> Figure:
    places = [np.cumsum(line.points[:, :2], axis=0) for line in lines]
    extents = [np.maximum(np.ptp(place, axis=0), 1e-9) for place in places]
    inner = (WIDTH - MARGIN) / columns - MARGIN
    inches = min(inner / max(extent[0] for extent in extents), TALLEST / max(extent[1] for extent in extents))
    strips = STRIP * len(lines[0].names) + 0.05 if changes else 0.0
    heights = [extent[1] * inches + 2 * GAP + strips for extent in extents]
    rows = [max(heights[first : first + columns]) for first in range(0, len(lines), columns)]
    total = sum(rows) + 0.2
    figure = Figure(figsize=(WIDTH, total))
    changed = [column_changes(line) for line in lines] if changes else [None] * len(lines)
    # One scale for all lines, so that colours compare; few steps, such as the first out of a zero state, do
    # not set it, however wide the pen's way is in them.
    top = np.percentile(np.concatenate([line.changes for line in lines]), 98) if changes else 0.0
    every_line = zip(lines, places, extents, heights, changed, strict=True)
    for number, (line, place, extent, height, sizes) in enumerate(every_line):
        row, column = divmod(number, columns)
        y = total - 0.1 - sum(rows[:row])
        box = (
            (MARGIN + column * (inner + MARGIN)) / WIDTH,
            (y - height + strips) / total,
            extent[0] * inches / WIDTH,
            (height - strips) / total,
        )
        axes = figure.add_axes(box)
        _strokes(axes, line, place, GAP / inches)
        if changes:
            _colours(axes, np.sqrt(np.square(sizes).mean(axis=0))[None], top)
            under = (box[0], (y - height + 0.05) / total, box[2], (strips - 0.05) / total)
            _strips(figure.add_axes(under), line.names, sizes, top)
    return figure


def _strokes(axes, line: Written, place: np.ndarray, gap: float) -> None:
    """The strokes of a line in its own units, y downwards, with room above and below."""
    for steps, colour in ((slice(0, line.primed), PRIMED), (slice(line.primed, None), INK)):
        points = line.points[steps].copy()
        if not len(points):
            continue
        if steps.start and line.points[steps.start - 1, 2] < 0.5:
            # The pen was down where the reading ended, so the writing goes on from there.
            points = np.concatenate([np.zeros((1, 3)), points])
        shift = place[steps.start - 1] if steps.start else 0.0
        for stroke in to_strokes(points):
            # A stroke of one point is a dot.
            marker = "." if len(stroke) == 1 else None
            x, y = (stroke + shift).T
            axes.plot(x, y, color=colour, linewidth=1.3, marker=marker, markersize=3, clip_on=False)
    low, high = place.min(axis=0), place.max(axis=0)
    # A drawing without a width still has a place.
    axes.set_xlim(low[0], max(high[0], low[0] + 1e-9))
    axes.set_ylim(high[1] + gap, low[1] - gap)
    axes.set_axis_off()


def _colours(axes, changes: np.ndarray, top: float) -> None:
    limits = (*axes.get_xlim(), *axes.get_ylim())
    axes.imshow(
        changes, extent=limits, aspect="auto", cmap=COLOURS, vmin=0, vmax=top or 1, alpha=0.6, zorder=-1
    )


def _strips(axes, names: Sequence[str], changes: np.ndarray, top: float) -> None:
    axes.imshow(changes, aspect="auto", cmap=COLOURS, vmin=0, vmax=top or 1, interpolation="nearest")
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.tick_params(length=0, pad=2)
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
