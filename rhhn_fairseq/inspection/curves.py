"""Curves of several training runs, and a table of their best and last values; ``curve_picture`` draws them.

A run has the name of its log file. Runs whose names differ only in a seed at the end (``_s1``, ``-seed2``)
belong together: they share a colour, and the table has a summary line for all of them.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.training_logs import TRAIN, TRAIN_INNER, Record, read_log

# For these, more is better; for all others, less.
MORE_IS_BETTER = ("accuracy", "bleu", "rank")
# Metrics to draw by default: the first that all logs have.
PREFERRED = ("bleu", "bpc", "accuracy", "mse", "loss")
# What a curve is drawn over.
AXES = ("updates", "epochs", "hours")

_SEED = re.compile(r"[-_.](?:seed[-_=]?|s)\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Curve:
    """A metric of one run in one subset.

    Attributes:
        run: its name. subset: ``train_inner``, ``train``, or a validation subset.
        updates: in ascending order. values: the metric after them.
        places: positions of the values on the picture's axis; None for the updates themselves.
    """

    run: str
    subset: str
    updates: list[int]
    values: list[float]
    places: list[float] | None = None

    @property
    def x(self) -> list[float]:
        """Returns the position of each value on the picture's axis."""
        return list(self.updates) if self.places is None else self.places

    @property
    def group(self) -> str:
        """Returns the run's name without its seed."""
        return _SEED.sub("", self.run)

    def best(self, better: str) -> tuple[float, int]:
        """Returns the best value and the first update at which it was reached; NaN is never the best."""
        sign = 1.0 if better == "max" else -1.0
        signed = [(sign * value, -update) for update, value in zip(self.updates, self.values, strict=True)]
        value, update = max((pair for pair in signed if not math.isnan(pair[0])), default=(math.nan, 0))
        return sign * value, -update

    def reached(self, threshold: float, better: str) -> int | None:
        """Returns the first update at which the threshold is reached or passed; None if there is none."""
        for update, value in zip(self.updates, self.values, strict=True):
            if value >= threshold if better == "max" else value <= threshold:
                return update
        return None


def read_curves(paths: list[str], metric: str, subsets: list[str], axis: str = "updates") -> list[Curve]:
    """Returns the curves of a metric, run after run.

    If a log has several lines for one update, as after a restart, the last one is used.

    Args:
        paths: log files. metric: such as ``accuracy``. subsets: such as ``valid`` and ``train_inner``.
        axis: one of AXES. Epochs and hours come from the training lines and are interpolated between them;
            hours are wall-clock time, without the updates that a restart repeated.

    Raises:
        UsageError: a file is no log, or has no such metric in one of the subsets (the message names those it
            has); or the log does not state the positions of its updates on the axis.
    """
    curves = []
    for name, path in zip(run_names(paths), paths, strict=True):
        records = read_log(path)
        known = None if axis == "updates" else _axis_of(records, axis, path)
        for subset in subsets:
            points = {
                r.update: r.figures[metric] for r in records if r.subset == subset and metric in r.figures
            }
            if not points:
                raise UsageError(f"{path}: {_available_metrics(records, metric, subset)}")
            updates = sorted(points)
            places = None if known is None else np.interp(updates, *known).tolist()
            curves.append(Curve(name, subset, updates, [points[update] for update in updates], places))
    return curves


def _axis_of(records: Sequence[Record], axis: str, path: str) -> tuple[list[float], list[float]]:
    """Returns updates in ascending order and their positions on an axis; update 0 is at 0."""
    places, last, before = {0: 0.0}, 0.0, 0.0
    for record in records:
        if record.subset not in (TRAIN, TRAIN_INNER):
            continue
        if axis == "epochs":
            place = record.epochs_done
        elif (wall := record.figures.get("wall")) is None:
            place = None
        else:
            if wall < last:
                # The run was restarted. Its clock goes on from the checkpoint's time, or begins again.
                reached = max((places[update] for update in places if update < record.update), default=0.0)
                before = reached if before + wall / 3600 < reached else before
            last, place = wall, before + wall / 3600
        if place is not None and math.isfinite(place):
            places[record.update] = place
    if len(places) < 2:
        what = "the epoch" if axis == "epochs" else "the elapsed time (wall)"
        raise UsageError(f"{path}: its training lines do not record {what}; use --x updates")
    updates = sorted(places)
    # A run that was restarted may pass an update later than it reached the next logged one afterwards.
    latest = np.minimum.accumulate([places[update] for update in reversed(updates)])
    return list(map(float, updates)), latest[::-1].tolist()


def choose_metric(paths: list[str], subsets: list[str]) -> str:
    """Returns the first metric of PREFERRED that every log has in every subset.

    Raises:
        UsageError: a file is no log, or they share none of these metrics.
    """
    shared = set(PREFERRED)
    for path in paths:
        records = read_log(path)
        for subset in subsets:
            if subset not in {record.subset for record in records}:
                raise UsageError(f"{path}: {_available_metrics(records, '', subset)}")
            shared &= {name for record in records if record.subset == subset for name in record.figures}
    if not shared:
        raise UsageError(f"the logs share none of {', '.join(PREFERRED)}: name one with --metric")
    return next(name for name in PREFERRED if name in shared)


def _available_metrics(records, metric: str, subset: str) -> str:
    known = {r.subset for r in records}
    if subset not in known:
        return f"has no subset {subset!r}, it has {', '.join(sorted(known))}"
    metrics = {name for r in records if r.subset == subset for name in r.figures}
    return f"has no metric {metric!r} in {subset}, it has {', '.join(sorted(metrics))}"


def run_names(paths: list[str]) -> list[str]:
    """Returns a name for each file: its own without extension, with its directory's if names are equal."""
    for name in (lambda path: path.stem, lambda path: f"{path.parent.name}/{path.stem}", str):
        names = [name(Path(path)) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def default_better(metric: str) -> str:
    """Returns whether the best value of a metric is its largest (``max``) or its smallest (``min``)."""
    return "max" if any(name in metric for name in MORE_IS_BETTER) else "min"


def table(curves: list[Curve], metric: str, better: str, threshold: float | None = None) -> str:
    """Returns a Markdown table of the best and last value of every curve, with a summary for several seeds.

    Args:
        threshold: adds the first update at which each curve reached it.
    """
    several = len({curve.subset for curve in curves}) > 1
    sign = "≥" if better == "max" else "≤"
    head = [
        "run",
        *(["subset"] if several else []),
        "updates",
        f"best {metric}",
        "at update",
        f"last {metric}",
    ]
    head += [] if threshold is None else [f"first update {sign} {threshold:g}"]
    rows = []
    for key, members in grouped(curves).items():
        for curve in members:
            value, update = curve.best(better)
            row = [curve.run, *([curve.subset] if several else [])]
            row += [f"{curve.updates[-1]:,}", f"{value:g}", f"{update:,}", f"{curve.values[-1]:g}"]
            if threshold is not None:
                reached = curve.reached(threshold, better)
                row.append("never" if reached is None else f"{reached:,}")
            rows.append(row)
        if len(members) > 1:
            rows.append(_summary(key, members, better, several, threshold))
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def grouped(curves: list[Curve]) -> dict[tuple[str, str], list[Curve]]:
    """Returns the curves by group and subset, in their given order."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.group, curve.subset), []).append(curve)
    return groups


def _summary(key, members: list[Curve], better: str, several: bool, threshold: float | None) -> list[str]:
    """Returns the line of runs that differ only in the seed: mean, minimum and maximum of their values."""
    group, subset = key
    row = [f"**{group}**, {len(members)} runs", *([subset] if several else []), ""]
    row += [_spread([curve.best(better)[0] for curve in members]), ""]
    row.append(_spread([curve.values[-1] for curve in members]))
    if threshold is not None:
        count = sum(curve.reached(threshold, better) is not None for curve in members)
        row.append(f"{count} of {len(members)}")
    return row


def _spread(values: list[float]) -> str:
    return f"{sum(values) / len(values):.4g} ({min(values):g} to {max(values):g})"


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
