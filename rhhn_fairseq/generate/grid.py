"""Lines of prepared handwriting in a grid, with their numbers and texts."""

from collections.abc import Sequence

import numpy as np

from rhhn_fairseq.data.strokes.store import StrokeSplit
from rhhn_fairseq.generate.picture import draw_lines
from rhhn_fairseq.generate.strokes import Written
from rhhn_fairseq.inspection.plotting import Figure

LONGEST_CAPTION = 120


def drawn_lines(size: int, lines: int, seed: int) -> list[int]:
    """Returns the sorted numbers of ``lines`` lines of a split, drawn at random; all if it has fewer."""
    return sorted(np.random.default_rng(seed).permutation(size)[:lines].tolist())


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
