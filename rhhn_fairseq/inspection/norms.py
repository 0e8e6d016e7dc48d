"""Draws the norms of a network's weights, block by block (Suarez 2017, figures 2 and 3)."""

import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from rhhn_fairseq.inspection.blocks import Block
from rhhn_fairseq.inspection.plotting import (
    MARKERS,
    Figure,
    add_legend,
    colour_of,
    literal,
    new_figure,
    styled,
)


def norm_arrays(runs: Mapping[str, Sequence[Block]]) -> dict[str, np.ndarray]:
    """Returns for each run the names, norms and numbers of weights of its blocks."""
    arrays = {}
    for run, blocks in runs.items():
        arrays[f"{run}.blocks"] = np.array([block.name for block in blocks])
        arrays[f"{run}.norms"] = np.array([block.norm for block in blocks])
        arrays[f"{run}.counts"] = np.array([block.count for block in blocks])
    return arrays


def block_label(name: str) -> str:
    """Returns a block's name with its layer in words.

    Below a handwriting model's window there is one layer, ``first``, and above it are the others, ``upper``.
    """
    name = re.sub(r"(?:^|(?<=\.))(?:stack\.)?first\.cell\.", "layer 1: ", name)
    return re.sub(
        r"(?:^|(?<=\.))(?:stack\.)?(upper\.)?(backward_)?cells\.(\d+)\.",
        lambda match: f"layer {int(match[3]) + (2 if match[1] else 1)}{', backward' if match[2] else ''}: ",
        name,
    )


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
