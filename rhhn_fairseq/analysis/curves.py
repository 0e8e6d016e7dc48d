"""Curves of several trainings in one picture, and their best and last figures in one table.

The name of a run is that of its log file. Runs whose names differ only in a seed at the end (``_s1``,
``-seed2``) belong together: they share a colour, and the table has a line for all of them.
"""

import io
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rhhn_fairseq.analysis.training_logs import read_log
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for

with needed_for("the curves need"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

BETTER = ("max", "min")
# Of these, more is better; of anything else, less.
MORE_IS_BETTER = ("accuracy", "bleu")
LINE_STYLES = ("-", "--", ":", "-.")
# One for each seed of a group.
MARKERS = "osD^v<>PX*"
FEW_POINTS = 30
# The figure that is drawn unless one is named: the first that all logs have.
PREFERRED = ("bleu", "bpc", "accuracy", "mse", "loss")

_SEED = re.compile(r"[-_.](?:seed[-_=]?|s)\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Curve:
    """A metric of one run in one subset.

    Attributes:
        run: its name. subset: ``train_inner``, ``train``, or a validation subset.
        updates: in rising order. values: the metric after them.
    """

    run: str
    subset: str
    updates: list[int]
    values: list[float]

    @property
    def group(self) -> str:
        """The run's name without its seed."""
        return _SEED.sub("", self.run)

    def best(self, better: str) -> tuple[float, int]:
        """The best value and the first update it was reached at; a value that is no number never is best."""
        sign = 1.0 if better == "max" else -1.0
        signed = [(sign * value, -update) for update, value in zip(self.updates, self.values, strict=True)]
        value, update = max((pair for pair in signed if not math.isnan(pair[0])), default=(math.nan, 0))
        return sign * value, -update

    def reached(self, threshold: float, better: str) -> int | None:
        """The first update with a value of the threshold or better; None if there is none."""
        for update, value in zip(self.updates, self.values, strict=True):
            if value >= threshold if better == "max" else value <= threshold:
                return update
        return None


def read_curves(paths: list[str], metric: str, subsets: list[str]) -> list[Curve]:
    """The curves of a metric, run after run.

    Where a log has several lines of one update, as after a run that was started again, the last holds.

    Args:
        paths: log files. metric: such as ``accuracy``. subsets: such as ``valid`` and ``train_inner``.

    Raises:
        UsageError: a file is no log, or has no such metric in one of the subsets; what it has is named.
    """
    curves = []
    for name, path in zip(run_names(paths), paths, strict=True):
        records = read_log(path)
        for subset in subsets:
            points = {
                r.update: r.figures[metric] for r in records if r.subset == subset and metric in r.figures
            }
            if not points:
                raise UsageError(f"{path}: {_available_metrics(records, metric, subset)}")
            updates = sorted(points)
            curves.append(Curve(name, subset, updates, [points[update] for update in updates]))
    return curves


def choose_metric(paths: list[str], subsets: list[str]) -> str:
    """The first of PREFERRED that every log has in every subset.

    Raises:
        UsageError: a file is no log, or there is none that all have.
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
    """A name for each file: its own without the ending, with its directory's where names would be equal."""
    for name in (lambda path: path.stem, lambda path: f"{path.parent.name}/{path.stem}", str):
        names = [name(Path(path)) for path in paths]
        if max(Counter(names).values(), default=0) <= 1:
            return names
    twice = Counter(names).most_common(1)[0][0]
    raise UsageError(f"{twice}: is given twice")


def default_better(metric: str) -> str:
    """Whether the best value of a metric is its largest (``max``) or its smallest (``min``)."""
    return "max" if any(name in metric for name in MORE_IS_BETTER) else "min"


def table(curves: list[Curve], metric: str, better: str, threshold: float | None = None) -> str:
    """A Markdown table: best and last value of every curve, and what runs of several seeds have in common.

    Args:
        threshold: adds the first update at which a curve reached it.
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
    for key, members in _grouped(curves).items():
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


def _grouped(curves: list[Curve]) -> dict[tuple[str, str], list[Curve]]:
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.group, curve.subset), []).append(curve)
    return groups


def _summary(key, members: list[Curve], better: str, several: bool, threshold: float | None) -> list[str]:
    """The line of runs that differ in the seed only: mean, least and greatest of what they reached."""
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


def picture(
    curves: list[Curve],
    metric: str,
    title: str | None = None,
    threshold: float | None = None,
    log_scale: bool = False,
) -> bytes:
    """The curves over updates as a PNG.

    Args:
        threshold: a dotted line at this value. log_scale: of the metric's axis.
    """
    # Without pyplot: no window system, and nothing kept when this returns.
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    subsets = list(dict.fromkeys(curve.subset for curve in curves))
    groups = list(dict.fromkeys(curve.group for curve in curves))
    members = _grouped(curves)
    for curve in curves:
        group = members[curve.group, curve.subset]
        label = curve.group if len(subsets) == 1 else f"{curve.group}, {curve.subset}"
        label += f" ({len(group)} runs)" if len(group) > 1 else ""
        # Seeds of a group differ in their markers, and a curve of few points shows where they are.
        marked = len(group) > 1 or len(curve.updates) <= FEW_POINTS
        axes.plot(
            curve.updates,
            curve.values,
            color=f"C{groups.index(curve.group) % 10}",
            linestyle=LINE_STYLES[subsets.index(curve.subset) % len(LINE_STYLES)],
            marker=MARKERS[group.index(curve) % len(MARKERS)] if marked else None,
            markevery=max(1, len(curve.updates) // FEW_POINTS),
            markersize=4,
            linewidth=1.5,
            alpha=0.85,
            label=label if curve is group[0] else None,
        )
    if threshold is not None:
        axes.axhline(threshold, color="0.5", linestyle=":", linewidth=1, label=f"threshold {threshold:g}")
    if log_scale:
        axes.set_yscale("log")
    axes.set_xlabel("updates")
    axes.xaxis.set_major_formatter(lambda value, position: f"{value:,.0f}")
    axes.set_ylabel(metric if len(subsets) > 1 else f"{metric} ({subsets[0]})")
    axes.set_title(title or f"{metric} during training")
    axes.grid(color="0.9")
    axes.legend(fontsize="small")
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()
