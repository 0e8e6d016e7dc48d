"""One line that shows how far a training is, and how long it will still take."""

import time

from tqdm import tqdm

from rhhn_fairseq.analysis.training_logs import TRAIN, TRAIN_INNER, Record

# Of a log line's figures, the first of these that it has is shown.
SHOWN = ("bpc", "accuracy", "loss")


class Progress:
    """A bar for the share of its budget that a training has used, updated from lines of its log.

    Args:
        title: of the run. options: of fairseq-train; ``max_epoch``, ``max_update`` and ``stop_time_hours``
            limit it, and the nearest limit counts. quiet: whether to show nothing.
    """

    def __init__(self, title: str, options: dict, quiet: bool = False):
        self._epochs = options.get("max_epoch")
        self._updates = options.get("max_update")
        hours = options.get("stop_time_hours")
        self._seconds = None if hours is None else 3600 * hours
        self._started = time.monotonic()
        # The share and the time of the first line that tells the share.
        self._first: tuple[float, float] | None = None
        self._figures = ""
        self._bar = tqdm(
            total=1.0,
            desc=title,
            disable=quiet,
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}% |{bar}|{postfix}",
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *details) -> None:
        self._bar.close()

    def show(self, record: Record) -> None:
        """Updates the bar from the figures in one line of the log."""
        if record.subset in (TRAIN, TRAIN_INNER):
            # fairseq's clock, by which it stops, goes on after a restart.
            seconds = record.figures.get("wall", time.monotonic() - self._started)
            share = self.share(record.epochs_done, record.update, seconds)
            if share is not None:
                self._first = self._first or (share, time.monotonic())
                self._bar.n = min(1.0, share)
        # After an epoch, its validation stays in the line.
        if record.subset != TRAIN:
            name = next((name for name in SHOWN if name in record.figures), None)
            figure = "" if name is None else f"{record.subset} {name} {record.figures[name]:g}, "
            self._figures = f"{figure}update {record.update:,}"
        self._bar.set_postfix_str(f"{self._figures}{self._left()}", refresh=True)

    def share(self, epochs: float | None, updates: int, seconds: float) -> float | None:
        """Returns the share of the budget that is used, by the nearest limit; None without a limit."""
        shares = []
        if self._epochs and epochs is not None:
            shares.append(epochs / self._epochs)
        if self._updates:
            shares.append(updates / self._updates)
        if self._seconds:
            shares.append(seconds / self._seconds)
        return max(shares, default=None)

    def _left(self) -> str:
        share, since = self._first or (0.0, self._started)
        done = self._bar.n - share
        if done <= 0:
            return ""
        seconds = (time.monotonic() - since) / done * (1.0 - self._bar.n)
        return f", {tqdm.format_interval(seconds)} left"
