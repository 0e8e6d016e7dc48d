"""Draws the curves of several training runs: seeds as a band, thresholds with a label."""

from collections.abc import Sequence

import numpy as np

from rhhn_fairseq.inspection.curves import Curve, grouped
from rhhn_fairseq.inspection.plotting import (
    COLOURS,
    FEW_POINTS,
    LINE_STYLES,
    MARKERS,
    Figure,
    add_legend,
    colour_of,
    literal,
    new_figure,
    styled,
    with_thousands,
)

UNITS = {
    "accuracy": "accuracy (%)",
    "bleu": "BLEU",
    "bpc": "bits per character",
    "gnorm": "norm of the gradient",
    "loss": "loss (in the unit of the log)",
    "mse": "mean squared error",
    "nats_seq": "nats per sequence",
    "ppl": "perplexity",
}


def band(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean and range of the curves of several seeds, over the range that all of them cover.

    Returns:
        positions on the axis where any curve has a value, and the mean, minimum and maximum there; values
        between a curve's own points are interpolated. Empty if the curves do not overlap.
    """
    start, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.unique([place for curve in curves for place in curve.x if start <= place <= end])
    if not len(x):
        return x, x, x, x
    values = np.array([np.interp(x, curve.x, curve.values) for curve in curves])
    return x, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


@styled()
def draw_curves(
    curves: list[Curve],
    metric: str,
    title: str | None = None,
    threshold: float | None = None,
    log_scale: bool = False,
    axis: str = "updates",
) -> Figure:
    """Draws the curves over updates, epochs or hours.

    Runs of one group, which differ in their seed, are drawn as their mean in a band from the lowest to the
    highest; if they do not overlap, each run has its own line with its own markers.

    Args:
        threshold: draws a labelled line at this value. log_scale: of the metric's axis.
        axis: one of ``curves.AXES``, with which the curves were read.
    """
    figure = new_figure(4.6)
    axes = figure.add_subplot()
    subsets = list(dict.fromkeys(curve.subset for curve in curves))
    groups = list(dict.fromkeys(curve.group for curve in curves))
    banded = False
    for (group, subset), members in grouped(curves).items():
        label = group if len(subsets) == 1 else f"{group}, {subset}"
        number = groups.index(group)
        # When the colours repeat, the line style changes.
        style = subsets.index(subset) + number // len(COLOURS) * len(subsets)
        look = {"color": colour_of(number), "linestyle": LINE_STYLES[style % len(LINE_STYLES)]}
        x, mean, low, high = band(members)
        if len(members) > 1 and len(x) > 1:
            _line(axes, x, mean, f"{label} ({len(members)} runs)", look)
            banded = True
            axes.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
            continue
        for number, curve in enumerate(members):
            name = label if len(members) == 1 else f"{label}, {curve.run}"
            _line(axes, curve.x, curve.values, name, look, MARKERS[number % len(MARKERS)])
    if threshold is not None:
        axes.axhline(threshold, color="0.35", linestyle=":", linewidth=1.2, label=f"threshold {threshold:g}")
        axes.annotate(
            f"{threshold:g}",
            (1.0, threshold),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color="0.35",
            annotation_clip=False,
        )
    if log_scale:
        axes.set_yscale("log")
    axes.set_xlabel({"hours": "hours since the start"}.get(axis, axis))
    if axis == "updates":
        with_thousands(axes.xaxis)
    unit = UNITS.get(metric, metric)
    axes.set_ylabel(unit if len(subsets) > 1 else f"{unit}, {subsets[0]}")
    axes.set_title(literal(title or f"{metric} during training"))
    note = "lines: mean of the runs; bands: from the lowest to the highest" if banded else None
    add_legend(figure, axes, note=note)
    return figure


def _line(axes, x, values, label: str, look: dict, marker: str = "o") -> None:
    """Draws a line, with a marker at each value if there are few."""
    shown = marker if len(x) <= FEW_POINTS else None
    axes.plot(x, values, marker=shown, markersize=4, label=literal(label), **look)


def curve_arrays(curves: Sequence[Curve], metric: str, axis: str) -> dict[str, np.ndarray]:
    """Returns the curves by name: updates, positions on the axis and values for each run and subset."""
    arrays = {}
    for curve in curves:
        name = f"{curve.run}.{curve.subset}"
        arrays[f"{name}.updates"] = np.array(curve.updates)
        if axis != "updates":
            arrays[f"{name}.{axis}"] = np.array(curve.x)
        arrays[f"{name}.{metric}"] = np.array(curve.values)
    return arrays
