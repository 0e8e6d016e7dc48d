"""Selects and corrects lines of handwriting for training."""

from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.data.strokes.points import Line
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.options import check_fields, option

OUTLIERS = ("none", "drop", "clip")
SCALES = ("none", "step", "height")
REASONS = ("short", "long", "flat")
"""Why a line is dropped, in the order of the checks."""


@dataclass(frozen=True)
class CleaningConfig:
    """Options of cleaning. Raises UsageError for an impossible value."""

    min_points: int = option(2, help="drop lines with fewer points", low=2)
    max_points: int = option(0, help="drop lines with more points; 0: keep all", low=0)
    outliers: str = option(
        "none",
        help="steps longer than --max-step: 'drop' leaves them out, so that the rest of the line moves up, "
        "'clip' shortens them, 'none' keeps them",
        choices=OUTLIERS,
    )
    max_step: float = option(
        60.0, help="longest step that is not an outlier, in medians of its line's steps", low=1
    )
    scale: str = option(
        "none",
        help="divide every line by its median 'step', or by its 'height' (10th to 90th percentile of y)",
        choices=SCALES,
    )

    def __post_init__(self):
        check_fields(self, flags=True)
        if self.max_points and self.max_points < self.min_points:
            raise UsageError(f"--max-points {self.max_points} is below --min-points {self.min_points}")
        if self.outliers == "none" and self.max_step != CleaningConfig.max_step:
            raise UsageError(f"--max-step {self.max_step} is for --outliers drop or clip")


def clean(line: Line, config: CleaningConfig) -> tuple[np.ndarray | str, int]:
    """Returns the points to store, or the reason to drop the line; and how many steps were outliers."""
    points, outliers = line.points, 0
    if config.outliers != "none":
        points, outliers = _limit_steps(points, config)
    if len(points) < config.min_points:
        return "short", outliers
    if config.max_points and len(points) > config.max_points:
        return "long", outliers
    if config.scale != "none":
        size = _median_step(points)
        if config.scale == "height":
            size = float(np.diff(np.percentile(np.cumsum(points[:, 1]), (10, 90)))[0])
        if not size > 0:
            return "flat", outliers
        points = points / (size, size, 1)
    return points, outliers


def _limit_steps(points: np.ndarray, config: CleaningConfig) -> tuple[np.ndarray, int]:
    lengths = np.hypot(points[:, 0], points[:, 1])
    limit = config.max_step * _median_step(points)
    long = lengths > limit
    if not limit or not long.any():
        return points, 0
    points = points.copy()
    if config.outliers == "clip":
        points[long, :2] *= (limit / lengths[long])[:, None]
        return points, int(long.sum())
    # A stroke whose last point is dropped ends at the last point that is kept.
    kept = np.flatnonzero(~long)
    last_kept = np.searchsorted(kept, np.flatnonzero(long & (points[:, 2] > 0))) - 1
    points[kept[last_kept], 2] = 1
    return points[kept], int(long.sum())


def _median_step(points: np.ndarray) -> float:
    """Returns the median length of the steps other than zero; 0 if all are zero."""
    lengths = np.hypot(points[1:, 0], points[1:, 1])
    lengths = lengths[lengths > 0]
    return float(np.median(lengths)) if lengths.size else 0.0
