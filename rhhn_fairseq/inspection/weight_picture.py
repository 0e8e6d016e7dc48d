"""Draws the changes of the weights over a text: the lines of the text, each with a strip for each matrix."""

import numpy as np

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.colours import colour_limit
from rhhn_fairseq.inspection.plotting import (
    COLOUR_MAP,
    Figure,
    add_colour_bar,
    literal,
    new_figure,
    styled,
)
from rhhn_fairseq.inspection.weights import Reading

COLUMNS = 76
# A taller picture is not readable; the HTML page is.
MOST_LINES = 60
# Height of a line of text above the strips, in rows of the strips.
TEXT_ROWS = 2
INCHES_A_ROW = 0.13
VISIBLE = {"\n": "↵", "\t": "→", "\r": "␍"}


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
def draw_weights(reading: Reading, title: str | None = None) -> Figure:
    """Draws the text in lines, and under each symbol how much each matrix changed when it was read.

    Raises:
        UsageError: the text is too long for a picture.
    """
    lines = wrapped(reading.symbols)
    if len(lines) > MOST_LINES:
        raise UsageError(
            f"the text takes {len(lines)} lines of {COLUMNS} symbols, a picture may have {MOST_LINES}; draw "
            "a page (.html) instead"
        )
    width, rows = max(end - start for start, end in lines), len(reading.names) + TEXT_ROWS
    table = np.full((rows * len(lines), max(width, 24)), np.nan)
    figure = new_figure(0.9 + INCHES_A_ROW * len(table))
    axes = figure.add_subplot()
    axes.grid(False)
    ticks, labels = [], []
    for number, (start, end) in enumerate(lines):
        top = number * rows + TEXT_ROWS
        table[top : top + len(reading.names), : end - start] = reading.changes[start:end].T
        for column, symbol in enumerate(reading.symbols[start:end]):
            text = VISIBLE.get(symbol, symbol)
            axes.text(column, top - 1.05, text, ha="center", va="center", family="monospace", fontsize=8)
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
    axes.set_title(literal(title or "Change of the recurrent weights as each symbol is read"))
    add_colour_bar(figure, axes, image, "L2 norm of a matrix's change, from one symbol to the next")
    return figure
