"""Reads the figures of a training run from fairseq's log file, written with any --log-format.

A line may begin with fairseq's or Hydra's time, level and logger, or with nothing, as in the files of
--log-file. What follows is one of::

    {"epoch": 1, "valid_loss": "0.4", "valid_num_updates": "250"}             json
    epoch 001 | valid on 'valid' subset | loss 0.4 | num_updates 250          simple, tqdm: after an epoch
    epoch 001:    100 / 250 loss=0.6, num_updates=100                         simple: within an epoch

Training lines within an epoch belong to the subset ``train_inner``, those after an epoch to ``train``.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from rhhn_fairseq.errors import UsageError

UPDATES = "num_updates"
# Position in the epochs in a JSON line; other formats have it in the text.
PLACES = ("epoch", "update")
TRAIN, TRAIN_INNER = "train", "train_inner"

_JSON = re.compile(r"(\{\".*\})\s*$")
_AFTER_EPOCH = re.compile(
    r"epoch (?P<epoch>\d{1,18}) \| (?:.* on '(?P<subset>[^']*)' subset \| )?(?P<figures>\S+ \S+ \| .*)$"
)
_WITHIN_EPOCH = re.compile(
    r"epoch (?P<epoch>\d{1,18}):\s+(?P<done>\d{1,18}) / (?P<all>\d{1,18}) (?P<figures>\S+=.*)$"
)


@dataclass(frozen=True)
class Record:
    """The figures of one line.

    Attributes:
        subset: ``train_inner``, ``train``, or the name of a validation subset. update: updates done.
        figures: the numbers by name. epoch: counted from 1; None if the line does not say.
        epochs_done: fractional number of epochs after that update; None if the line does not say.
    """

    subset: str
    update: int
    figures: dict[str, float]
    epoch: int | None = None
    epochs_done: float | None = None


def read_log(path: str | Path) -> list[Record]:
    """Returns the records of a log, in its order.

    Raises:
        UsageError: the file cannot be read, or it has no training line.
    """
    with open(path, encoding="utf-8", errors="replace") as file:
        records = [record for line in file if (record := parse_line(line)) is not None]
    if not records:
        raise UsageError(f"{path}: contains no training metrics as fairseq-train logs them")
    return records


def parse_line(line: str) -> Record | None:
    """Returns the record of a line; None for lines without figures."""
    line = line.rstrip()
    if match := _JSON.search(line):
        return _from_json(match[1])
    if match := _AFTER_EPOCH.search(line):
        pairs = (item.split(" ", 1) for item in match["figures"].split(" | "))
        done = None if match["subset"] else float(match["epoch"])
        return _record(match["subset"] or TRAIN, pairs, match["epoch"], done)
    if match := _WITHIN_EPOCH.search(line):
        pairs = (pair.split("=", 1) for pair in match["figures"].split(", "))
        done = int(match["epoch"]) - 1 + int(match["done"]) / max(1, int(match["all"]))
        return _record(TRAIN_INNER, pairs, match["epoch"], done)
    return None


def _from_json(text: str) -> Record | None:
    try:
        record = json.loads(text)
    # A line that was cut off, or that only looks like JSON; the parser recurses for each bracket.
    except (ValueError, RecursionError):
        return None
    epoch = record.get("epoch")
    if UPDATES in record:
        return _record(TRAIN_INNER, record.items(), epoch, _number(record.get("update")))
    for key in record:
        if key.endswith(f"_{UPDATES}"):
            prefix = key.removesuffix(UPDATES)
            pairs = ((name.removeprefix(prefix), value) for name, value in record.items())
            subset = prefix.removesuffix("_")
            return _record(subset, pairs, epoch, _number(epoch) if subset == TRAIN else None)
    return None


def _number(value) -> float | None:
    """Returns the value as a number; None if it is not one, such as null, or beyond float64."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _record(subset: str, pairs, epoch, epochs_done: float | None) -> Record | None:
    figures = {pair[0]: _number(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] not in PLACES}
    figures = {name: number for name, number in figures.items() if number is not None}
    update = figures.pop(UPDATES, None)
    if update is None or not math.isfinite(update):
        return None
    epoch = _number(epoch)
    epoch = int(epoch) if epoch is not None and epoch.is_integer() else None
    return Record(subset, int(update), figures, epoch, epochs_done)
