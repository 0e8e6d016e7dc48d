"""Smooths strokes between their points, and finds last strokes that are too short to have a shape."""

import numpy as np

from rhhn_fairseq.data.strokes.points import to_strokes
from rhhn_fairseq.generate.strokes import Written

# A stroke of up to this many points is at most one straight segment.
LONGEST_STUB = 2


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


def stub(line: Written) -> int:
    """Returns how many points at a line's end belong to a stroke that was cut off before it had a shape.

    A model that passes its text's end, or reaches the limit of points, may just have set the pen down again.
    """
    last = len(to_strokes(line.points)[-1])
    written = len(line.points) - line.primed
    return last if line.cut and last <= LONGEST_STUB and last < written else 0
