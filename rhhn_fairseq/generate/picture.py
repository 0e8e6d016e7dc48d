"""Plots written lines: smooth strokes with their pen lifts, coloured by the change of the weights."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.strokes.points import to_strokes
from rhhn_fairseq.data.strokes.store import StrokeSplit
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.files import check_output, replace_file
from rhhn_fairseq.generate.strokes import Written, stub
from rhhn_fairseq.inspection.colours import colour_limit
from rhhn_fairseq.inspection.plotting import COLOURS, LINE_COLOUR_MAP, Figure, encode, styled

with needed_for("pictures need"):
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path as Curve

FORMATS = ("svg", "png")

# In inches: the figure's width, and the space around a line of writing.
WIDTH, MARGIN, GAP, STRIP, CAPTION, BAR = 10.0, 0.35, 0.15, 0.1, 0.22, 0.65
TALLEST = 6.0
# Columns of a strip.
COLUMNS = 600
# In points; colours need a wider pen. Agg draws nothing for a curve without length, so a dot has this one.
PEN, COLOURED_PEN, DOT = 1.3, 1.8, 1e-3

LONGEST_CAPTION = 120
MOST_COLUMNS = 20
"""Lines side by side; more leave no room on the page."""

INK, PRIMED = "black", COLOURS[1]


def output_paths(output: str | Path, inputs: Iterable[str | None] = ()) -> list[Path]:
    """Returns the files of a picture: ``output`` if it ends in .svg or .png, else one with each ending.

    Raises:
        UsageError: one of them cannot be written, see ``check_output``, or is one of the inputs.
    """
    output, kinds = Path(output), [""]
    if output.suffix[1:].lower() not in FORMATS:
        kinds = [f".{kind}" for kind in FORMATS]
    paths = [output.with_name(output.name + kind) for kind in kinds]
    for path in paths:
        check_output("--output", path, inputs)
    return paths


def column_changes(line: Written, columns: int = COLUMNS) -> np.ndarray:
    """Returns the largest change of each matrix while the pen was over each column of a line, [M, columns].

    The pen's path counts whether the pen is down or not; columns that it never crosses have 0.
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
    """Draws lines one below the other, or row by row in columns, all at one scale.

    Args:
        changes: whether to show the change of the weights: of all matrices together as the colour of the
            strokes, and of each matrix in a strip below them. Without effect for models whose weights do not
            change.

    Raises:
        UsageError: a file cannot be written.
    """
    figure = draw_lines(lines, changes, columns)
    for path in paths:
        with replace_file(path) as file:
            file.write(encode(figure, path.suffix[1:].lower()))


@styled()
def draw_lines(
    lines: Sequence[Written], changes: bool = True, columns: int = 1, captions: Sequence[str] = ()
) -> Figure:
    """Returns the figure that ``draw`` saves.

    Args:
        captions: texts above the lines; none, or one for each line.
    """
    # Without the last stroke of a line where drawing stopped before that stroke had a shape.
    ends = [len(line.points) - stub(line) for line in lines]
    lines = [
        replace(line, points=line.points[:end], changes=line.changes[:end], cut=False)
        for line, end in zip(lines, ends, strict=True)
    ]
    changes = changes and bool(lines[0].names)
    places = [np.cumsum(line.points[:, :2], axis=0) for line in lines]
    extents = [np.maximum(np.ptp(place, axis=0), 1e-9) for place in places]
    inner = (WIDTH - MARGIN) / columns - MARGIN
    inches = min(inner / max(extent[0] for extent in extents), TALLEST / max(extent[1] for extent in extents))
    below = STRIP * len(lines[0].names) + 0.05 if changes else 0.0
    above = CAPTION if captions else 0.0
    heights = [above + extent[1] * inches + 2 * GAP + below for extent in extents]
    rows = [max(heights[first : first + columns]) for first in range(0, len(lines), columns)]
    total = sum(rows) + (BAR if changes else 0.0) + 0.2
    figure = Figure(figsize=(WIDTH, total))
    # One scale for all lines, so that colours are comparable.
    limit = colour_limit(np.concatenate([line.changes for line in lines])) if changes else 1.0
    for number, (line, place, extent, height) in enumerate(zip(lines, places, extents, heights, strict=True)):
        row, column = divmod(number, columns)
        left, top = MARGIN + column * (inner + MARGIN), total - 0.1 - sum(rows[:row])
        box = _box(left, top - height + below, extent[0] * inches, height - above - below, total)
        axes = figure.add_axes(box)
        _draw_strokes(axes, line, place, limit if changes else None, DOT / 72 / inches)
        low, high = place.min(axis=0), place.max(axis=0)
        # A drawing of zero width still needs an interval.
        axes.set_xlim(low[0], max(high[0], low[0] + 1e-9))
        axes.set_ylim(high[1] + GAP / inches, low[1] - GAP / inches)
        axes.set_axis_off()
        if changes:
            strips = _box(left, top - height + 0.05, extent[0] * inches, below - 0.05, total)
            image = _draw_strips(figure.add_axes(strips), line.names, column_changes(line), limit)
        if captions:
            middle = (top - 0.5 * CAPTION) / total
            figure.text(left / WIDTH, middle, captions[number], fontsize=8, va="center", parse_math=False)
    if changes:
        primed = any(line.primed for line in lines)
        _draw_bar(figure, image, total, "; the line that was read first is orange" if primed else "")
    return figure


def _box(left: float, bottom: float, width: float, height: float, total: float) -> tuple[float, ...]:
    """Converts inches to fractions of the sides of a figure of height ``total``."""
    return left / WIDTH, bottom / total, width / WIDTH, height / total


def _draw_strokes(axes, line: Written, place: np.ndarray, limit: float | None, dot: float) -> None:
    """Draws a line's strokes in its own units, y downwards; coloured from 0 to ``limit`` if it is set.

    Args:
        dot: how long a curve between two equal points is drawn.
    """
    start = 0
    curves, sizes, primed = [], [], []
    for stroke in to_strokes(line.points):
        stroke = stroke + place[0]
        steps = range(start, start + len(stroke))
        start += len(stroke)
        if len(stroke) == 1:
            # A dot, as wide as the pen.
            stroke = np.repeat(stroke, 2, axis=0)
            steps = range(steps[0] - 1, steps[0] + 1)
        for step, curve in zip(steps[1:], smoothed(stroke), strict=True):
            if not np.ptp(curve, axis=0).any():
                curve[2:, 0] += dot
            curves.append(Curve(curve, [Curve.MOVETO, *[Curve.CURVE4] * 3]))
            sizes.append(step)
            primed.append(step < line.primed)
    width = PEN if limit is None else COLOURED_PEN
    look = {"facecolor": "none", "linewidth": width, "capstyle": "round", "clip_on": False}
    for reading in (True, False):
        own = [number for number, each in enumerate(primed) if each == reading]
        if not own:
            continue
        collection = PathCollection([curves[number] for number in own], **look)
        if reading or limit is None:
            collection.set_edgecolor(PRIMED if reading else INK)
        else:
            changes = np.sqrt(np.square(line.changes).mean(axis=1))
            colours = LINE_COLOUR_MAP(changes[[sizes[number] for number in own]] / limit)
            collection.set_edgecolor(colours)
        axes.add_collection(collection, autolim=False)


def _draw_strips(axes, names: Sequence[str], changes: np.ndarray, limit: float):
    image = axes.imshow(
        changes, aspect="auto", cmap=LINE_COLOUR_MAP, vmin=0, vmax=limit, interpolation="nearest"
    )
    axes.grid(False)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.tick_params(length=0, pad=2)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    return image


def _draw_bar(figure: Figure, image, total: float, note: str) -> None:
    axes = figure.add_axes(_box(WIDTH / 4, BAR - 0.15, WIDTH / 2, 0.12, total))
    bar = figure.colorbar(image, cax=axes, orientation="horizontal", extend="max")
    bar.set_label(
        f"L2 norm of a matrix's change from one point to the next; strokes: root mean square of all{note}",
        fontsize=8.5,
    )
    axes.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def smoothed(stroke: np.ndarray) -> np.ndarray:
    """Returns cubic Bezier curves [n - 1, 4, 2] that pass smoothly through a stroke's points [n, 2], n >= 2.

    Each curve goes from one point to the next. Together they are the centripetal Catmull-Rom spline (Yuksel,
    Schaefer, Keyser 2011), which passes through all points and makes no loops between two of them. At both
    ends of the stroke the tangent has the direction of the chord.
    """
    start, end = stroke[:-1], stroke[1:]
    # The spline's parameter grows by the root of the distance; coincident points have zero direction.
    time = np.sqrt(np.linalg.norm(end - start, axis=1, keepdims=True))
    speed = (end - start) / np.maximum(time, 1e-12)
    tangents = np.zeros_like(stroke)
    before, after = time[:-1], time[1:]
    tangents[1:-1] = (speed[:-1] * after + speed[1:] * before) / np.maximum(before + after, 1e-12)
    tangents[0], tangents[-1] = speed[0], speed[-1]
    return np.stack([start, start + tangents[:-1] * time / 3, end - tangents[1:] * time / 3, end], axis=1)


def stroke_grid(split: StrokeSplit, name: str, numbers: Sequence[int], columns: int) -> Figure:
    """Returns a figure of the lines with these numbers, row by row, at one scale.

    Args:
        name: of the split, in the captions.
    """
    lines, captions = [], []
    for number in numbers:
        points, text = split.points(number).astype(np.float64), split.texts[number]
        lines.append(Written(points, 0, text or None, True, np.zeros((len(points), 0)), ()))
        captions.append(f"{name}:{number}  {text}".rstrip()[: LONGEST_CAPTION // columns])
    return draw_lines(lines, columns=columns, captions=captions)
