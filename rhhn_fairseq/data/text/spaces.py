"""Penn Treebank's two character texts: the raw one, and the one without the outer spaces of lines.

Shapes: T codes in a chunk.
"""

from collections.abc import Iterable, Iterator

import numpy as np

NEWLINE = ord("\n")
SPACE = ord(" ")


def drop_code(chunks: Iterable[np.ndarray], code: int) -> Iterator[np.ndarray]:
    """Yields the chunks [T] without a code."""
    for codes in chunks:
        yield codes[codes != code]


def drop_outer_spaces(chunks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the chunks [T] without the spaces at the beginning and the end of each line."""
    held = np.zeros(0, dtype=np.uint8)
    begins_line = True
    for codes in chunks:
        text = np.concatenate([held, codes])
        others = np.flatnonzero(text != SPACE)
        # What follows the spaces at the chunk's end decides whether they are dropped.
        end = int(others[-1]) + 1 if others.size else 0
        held = text[end:]
        if end:
            yield text[:end][~outer_spaces(text[:end], SPACE, NEWLINE, begins_line)]
            begins_line = bool(text[end - 1] == NEWLINE)


def outer_spaces(symbols: np.ndarray, space: int, newline: int, begins_line: bool = True) -> np.ndarray:
    """Returns where the outer spaces of lines are, bool [T]: those next to a newline or an end of the text.

    Args:
        symbols: codes, or dictionary indices, [T].
        space, newline: their codes or indices.
        begins_line: whether the first symbol is the first of a line.
    """
    is_space = symbols == space
    edges = np.flatnonzero(np.diff(is_space, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    after_newline = np.where(starts > 0, symbols[starts - 1] == newline, begins_line)
    before_newline = ends == len(symbols)
    before_newline[~before_newline] = symbols[ends[~before_newline]] == newline
    outer = after_newline | before_newline
    change = np.zeros(len(symbols) + 1, dtype=np.int8)
    change[starts[outer]] += 1
    change[ends[outer]] -= 1
    return np.cumsum(change[:-1], dtype=np.int8).astype(bool)
