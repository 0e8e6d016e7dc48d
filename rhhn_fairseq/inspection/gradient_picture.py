"""Draws the gradients of several models."""

from collections.abc import Sequence

import numpy as np

from rhhn_fairseq.inspection.gradients import Flow
from rhhn_fairseq.inspection.plotting import (
    MARKERS,
    Figure,
    add_legend,
    colour_of,
    literal,
    new_figure,
    styled,
)


@styled()
def draw_gradients(flows: Sequence[Flow], shares: bool = False, title: str | None = None) -> Figure:
    """Draws norms over time and by layer; with ``shares`` also how much of the gradient of c comes through h.

    Norms of zero, beyond a cut by h-detach, are omitted, because the axis is logarithmic.
    """
    with_memory = [flow for flow in flows if len(flow.share_of_h)] if shares else []
    figure = new_figure(7.0 if with_memory else 4.4)
    if with_memory:
        panels = figure.subplot_mosaic([["outside", "within"], ["share", "share"]], width_ratios=(2, 1))
    else:
        panels = figure.subplot_mosaic([["outside", "within"]], width_ratios=(2, 1))
    # A model with initial weights has the colour of the trained one, with a dashed line.
    bases = list(dict.fromkeys(flow.run.removesuffix(", initial") for flow in flows))
    for flow in flows:
        number = bases.index(flow.run.removesuffix(", initial"))
        look = {"color": colour_of(number), "linestyle": "--" if flow.initial else "-"}
        steps = np.arange(1, len(flow.norms) + 1)
        panels["outside"].plot(steps, _positive(flow.outside), label=literal(flow.run), **look)
        if flow in with_memory:
            panels["share"].plot(steps[:-1], 100 * flow.share_of_h, **look)
        layers = np.arange(1, len(flow.within) + 1)
        # A network of one layer has a marker, and no line that could be dashed.
        marks = {"marker": MARKERS[number % len(MARKERS)], "fillstyle": "none" if flow.initial else "full"}
        panels["within"].plot(layers, _positive(flow.within), markersize=5, **marks, **look)
    panels["outside"].set_title("outside the cell (mean over layers)", fontsize=10.5)
    panels["outside"].set_xlabel("step t; the loss is that of the last")
    panels["outside"].set_ylabel("norm of dLoss / d state")
    panels["within"].set_title("within (mean over time)", fontsize=10.5)
    panels["within"].set_xlabel("layer")
    panels["within"].set_xticks(range(1, max(len(flow.within) for flow in flows) + 1))
    for name in ("outside", "within"):
        panels[name].set_yscale("log")
    if with_memory:
        panels["share"].set_title("share of the gradient of c at step t that comes through h", fontsize=10.5)
        panels["share"].set_xlabel("step t")
        panels["share"].set_ylabel("percent")
        panels["share"].set_ylim(0, 100)
    figure.suptitle(literal(title or "Gradients of the last step's loss"), fontsize=12, fontweight="bold")
    add_legend(figure, panels["outside"])
    return figure


def _positive(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, np.nan)


def gradient_arrays(flows: Sequence[Flow]) -> dict[str, np.ndarray]:
    """Returns the norms [T, L], the layers' names and the shares of each model."""
    arrays = {}
    for flow in flows:
        arrays[f"{flow.run}.norms"] = flow.norms
        arrays[f"{flow.run}.layers"] = np.array(flow.names)
        arrays[f"{flow.run}.share_of_h"] = flow.share_of_h
    return arrays
