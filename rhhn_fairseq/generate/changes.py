"""How much the weights change within strokes and between them.

Shapes: N points of a line, M matrices that a hypernetwork generates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.generate.strokes import Written


@dataclass(frozen=True)
class StrokeChanges:
    """Mean changes of the weights per step, as root mean squares over the matrices.

    Attributes:
        within: in the steps that read a point within a stroke, nan if there are none.
        at_the_end: in those that read the last point of a stroke.
        at_the_start: in those that read the first point of a stroke that follows another.
    """

    within: float
    at_the_end: float
    at_the_start: float

    def __str__(self):
        return (
            f"the weights change by {self.within:.3g} in a step within strokes, "
            f"{self.at_the_end:.3g} where one ends, {self.at_the_start:.3g} where the next begins"
        )


def stroke_changes(lines: Sequence[Written]) -> StrokeChanges | None:
    """Returns the means over drawn points; None if no weights change or no step reads an end or a start."""
    read: list[list[float]] = [[], [], []]
    for line in lines:
        if not line.names:
            return None
        sizes = np.sqrt(np.square(line.changes).mean(axis=1))
        lifted = line.points[:, 2] > 0.5
        # Step n reads point n - 1. The first step that can change the weights is the second.
        for n in range(max(2, line.primed), len(sizes)):
            place = 1 if lifted[n - 1] else 2 if lifted[n - 2] else 0
            read[place].append(float(sizes[n]))
    if not (read[1] and read[2]):
        return None
    within, at_the_end, at_the_start = (np.mean(values) if values else np.nan for values in read)
    return StrokeChanges(within, at_the_end, at_the_start)
