"""The line that a model reads before it writes."""

import dataclasses
import os
import re
from pathlib import Path

from rhhn_fairseq.data.strokes.points import Line
from rhhn_fairseq.data.strokes.store import StrokeSplit
from rhhn_fairseq.data.strokes.stroke3 import read_line
from rhhn_fairseq.errors import UsageError

_PLACE = re.compile(r"(\w+):(\d+)")


def read_prime(
    place: str, data: str | None, text: str | None = None, points: int | None = None, y_up: bool = False
) -> Line:
    """Returns a line of handwriting in the corpus's units.

    Args:
        place: ``SPLIT:NUMBER`` of a prepared directory, counted from 0, or a ``.npy`` file in the stroke-3
            format.
        data: that directory. text: what is written there, None for the recorded text, if any.
        points: how many of its first points to take, None for all. y_up: whether y grows upwards in the file.

    Raises:
        UsageError: there is no such line, or it cannot be read.
    """
    match = _PLACE.fullmatch(place)
    if match is None:
        # For a name that is too long os.path returns False, where Path raises.
        if not os.path.exists(place):
            raise UsageError(f"--prime {place}: no such file; name a .npy file, or a line as SPLIT:NUMBER")
        line = read_line(Path(place), y_up=y_up)
    else:
        if data is None:
            raise UsageError(f"--prime {place}: name the data directory with --data")
        split, number = StrokeSplit(data, match[1]), int(match[2])
        if number >= len(split):
            raise UsageError(
                f"--prime {place}: the {match[1]} split of {data} has lines 0 to {len(split) - 1}"
            )
        line = Line(split.names[number], split.points(number), split.texts[number] or None)
    if points is not None:
        if not 1 <= points <= len(line.points):
            raise UsageError(f"--prime-points {points}: the line has {len(line.points)} points")
        line = dataclasses.replace(line, points=line.points[:points])
    return line if text is None else dataclasses.replace(line, text=text)
