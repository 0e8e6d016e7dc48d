"""Lines of handwriting, as strokes and as offsets (see the package's docstring), and corpora of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rhhn_fairseq.errors import UsageError

FIRST_ROWS = ("drawn", "moved")


@dataclass(frozen=True)
class Line:
    """One line of handwriting.

    Attributes:
        name: its name in messages and in the prepared directory.
        points: float64 [N, 3], as the package's docstring says.
        text: what is written, None if that is not known.
    """

    name: str
    points: np.ndarray
    text: str | None = None


@dataclass
class Loaded:
    """The lines of a corpus.

    Attributes:
        splits: the lines by the name of their split: train, valid, perhaps valid_second, perhaps test.
        inputs: for each file or folder that was read its name, size in bytes and SHA-256.
        notes: what users should know, as counts by a short description.
    """

    splits: dict[str, list[Line]]
    inputs: list[dict] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StrokeCorpus:
    """A corpus to prepare.

    Attributes:
        name: which kind it is. variant: the corpus in words.
        options: what determines the result besides the input and the cleaning; recorded in the manifest.
        load: reads it all; raises UsageError for input that cannot be read.
    """

    name: str
    variant: str
    options: dict
    load: Callable[[], Loaded]


def from_strokes(strokes: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Returns the points [N, 3] of strokes, each an array [n, 2] of absolute coordinates, y downwards.

    Strokes without a point are left out.

    Raises:
        UsageError: there is no point at all, or a coordinate is NaN or infinite.
    """
    strokes = [np.asarray(stroke, dtype=np.float64) for stroke in strokes if len(stroke)]
    if not strokes:
        raise UsageError(f"{name}: has no points")
    places = np.concatenate(strokes)
    points = np.zeros((len(places), 3))
    # A difference of finite numbers may overflow; it is checked below.
    with np.errstate(over="ignore", invalid="ignore"):
        points[1:, :2] = np.diff(places, axis=0)
    points[np.cumsum([len(stroke) for stroke in strokes]) - 1, 2] = 1
    return _checked(points if np.isfinite(places[0]).all() else places, name)


def from_offsets(rows: np.ndarray, name: str, first_row: str = "drawn", y_up: bool = False) -> np.ndarray:
    """Returns the points [N, 3] of an array in the stroke-3 format, [n, 3] of (dx, dy, pen bit).

    Args:
        first_row: what a first row that is not zero means. ``drawn``: the pen was down at the origin and
            draws to it, so the origin is one more point; ``moved``: the pen goes there before it touches.
            A first row (0, 0, any) is the first point in either case.
        y_up: whether the array's y grows upwards.

    Raises:
        UsageError: the array has another shape, numbers that are not finite, or pen bits other than 0 and 1.
    """
    rows = np.asarray(rows)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind not in "iufb":
        raise UsageError(
            f"{name}: is an array of {rows.dtype} of shape {rows.shape}, expected numbers of shape "
            "(points, 3)"
        )
    if not len(rows):
        raise UsageError(f"{name}: has no points")
    points = _checked(np.array(rows, dtype=np.float64), name)
    strange = ~np.isin(points[:, 2], (0, 1))
    if strange.any():
        row = int(strange.argmax())
        raise UsageError(f"{name}: the pen bit of point {row} is {points[row, 2]:g}, expected 0 or 1")
    if y_up:
        points[:, 1] *= -1
    if points[0, :2].any() and first_row == "drawn":
        points = np.concatenate([np.zeros((1, 3)), points])
    elif not points[0, :2].any():
        # Some files have (0, 0, 1) there to say that nothing was drawn before.
        points[0, 2] = 0
    points[0, :2] = 0
    points[-1, 2] = 1
    # Negating zero gives minus zero, which is harmless but ugly.
    return points + 0.0


def to_strokes(points: np.ndarray) -> list[np.ndarray]:
    """Returns the strokes of points [N, 3], arrays [n, 2] of coordinates relative to the first point."""
    places = np.cumsum(np.asarray(points, dtype=np.float64)[:, :2], axis=0)
    ends = np.flatnonzero(points[:, 2] > 0.5) + 1
    return [stroke for stroke in np.split(places, ends) if len(stroke)]


def _checked(points: np.ndarray, name: str) -> np.ndarray:
    """Returns the array; UsageError names the first row with a number that is NaN or infinite."""
    bad = ~np.isfinite(points).all(axis=1)
    if bad.any():
        row = int(bad.argmax())
        shown = ", ".join(f"{number:g}" for number in points[row])
        raise UsageError(f"{name}: point {row} is not finite ({shown})")
    return points
