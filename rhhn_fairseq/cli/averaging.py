"""Averages the weights of several checkpoints of one training run, which often translates or predicts better
than any of them (Vaswani et al. 2017, section 6.1).

Checkpoints are loaded as everywhere in the project, with data only.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rhhn_fairseq.compat import checkpoints
from rhhn_fairseq.compat.names import HIGHER_IS_BETTER
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless

EPOCH = re.compile(r"checkpoint(\d+)\.pt")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")
_BEST = re.compile(r"checkpoint\.best_(.+)_-?[\d.]+\.pt")
_LISTS = {
    "epoch": (EPOCH, "--save-interval without --no-epoch-checkpoints"),
    "update": (UPDATE, "--save-interval-updates"),
}

# Buffers that identify the data a model was trained on.
_OF_THE_DATA = ("pieces_sha256", "symbol_codes", "statistics")


@dataclass(frozen=True)
class Score:
    """The metric by which fairseq compares the checkpoints of a training run.

    Attributes:
        metric: its name, such as loss or bleu. value: that of this checkpoint. maximised: larger is better.
        updates: after how many updates the checkpoint was saved.
    """

    metric: str
    value: float
    maximised: bool
    updates: int


def last_checkpoints(directory: str | Path, number: int, by: str = "epoch") -> list[Path]:
    """Returns the last checkpoints of a training run, the newest last.

    Args:
        by: "epoch" for those saved after an epoch, "update" for those of --save-interval-updates.

    Raises:
        UsageError: the directory has fewer of them.
    """
    pattern, option = _LISTS[by]
    files = _files(directory)
    candidates = [(int(match[1]), path) for path in files if (match := pattern.fullmatch(path.name))]
    if len(candidates) < number:
        raise UsageError(
            f"--last {number}: {directory} has {len(candidates)} checkpoints by {by} ({option} writes them)"
        )
    return [path for _, path in sorted(candidates)[-number:]]


def best_checkpoints(directory: str | Path, number: int, metric: str | None = None) -> list[Path]:
    """Returns the best checkpoints of a training run by the metric stored in them, the best first.

    Candidates are the checkpoints of epochs and updates, and those that --keep-best-checkpoints names
    ``checkpoint.best_METRIC_VALUE.pt``.

    Args:
        metric: restricts the candidates to checkpoints that were compared by this metric.

    Raises:
        UsageError: the directory has fewer of them, or they were compared by several metrics.
    """
    patterns = (EPOCH, UPDATE, _BEST)
    paths = [path for path in _files(directory) if any(pattern.fullmatch(path.name) for pattern in patterns)]
    if not paths:
        raise UsageError(
            f"--best {number}: {directory} has no checkpoints to choose from (--keep-best-checkpoints, "
            "--save-interval-updates, or --save-interval without --no-epoch-checkpoints writes them)"
        )
    scores: dict[tuple[str, int], tuple[Score, Path]] = {}
    for path in paths:
        score = read_score(load(path))
        # fairseq saves the same state under several names.
        if score is not None and metric in (None, score.metric):
            scores.setdefault((score.metric, score.updates), (score, path))
    candidates = list(scores.values())
    metrics = sorted({score.metric for score, _ in candidates})
    if len(metrics) > 1:
        raise UsageError(f"{directory}: has checkpoints by {' and by '.join(metrics)}; choose with --metric")
    if len(candidates) < number:
        of = f"a stored {metric}" if metric else "a stored metric"
        raise UsageError(f"--best {number}: {directory} has {len(candidates)} checkpoints with {of}")
    candidates.sort(key=lambda pair: -pair[0].value if pair[0].maximised else pair[0].value)
    return [path for _, path in candidates[:number]]


def read_score(state: dict) -> Score | None:
    """Returns the metric that a checkpoint was compared by; None if it was saved without one."""
    value = (state.get("extra_state") or {}).get("val_loss")
    if not isinstance(value, (int, float)) or math.isnan(value):
        return None
    settings = state.get("cfg") or {}
    settings = settings.get("checkpoint", {}) if isinstance(settings, dict) else {}
    if not settings:
        # Checkpoints of fairseq's older models hold all options in one namespace.
        settings = vars(state.get("args") or object) if state.get("args") else {}
    metric = str(settings.get("best_checkpoint_metric", "loss"))
    return Score(
        metric,
        float(value),
        metric in HIGHER_IS_BETTER or bool(settings.get("maximize_best_checkpoint_metric", False)),
        updates_of(state),
    )


def updates_of(state: dict) -> int:
    """Returns after how many updates a checkpoint was saved; 0 if it does not say."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates", 0))


def load(path: str | Path) -> dict:
    """Loads a checkpoint as fairseq stored it; its tensors stay in the file until they are used."""
    # fairseq's older models store their options in a namespace.
    checkpoints.allow_namespace()
    refuse_endless(path)
    try:
        return checkpoints.WeightsOnlyTorch.load(str(path), map_location="cpu", mmap=True)
    except OSError as error:
        raise UsageError(f"checkpoint {path} cannot be read: {error.strerror or error}") from error


def average(paths: Sequence[str | Path], ema: bool = False) -> dict:
    """Returns a checkpoint whose weights are the mean of those of several checkpoints.

    Everything else, such as the configuration and integer buffers, is that of the newest, the one with most
    updates. The optimizer's state and the validation result are omitted, as they do not belong to the mean.

    Args:
        ema: average the weights that --store-ema keeps instead of the trained ones; with one checkpoint,
            those are used as they are.

    Raises:
        UsageError: a checkpoint cannot be read, holds no such weights or weights that are not finite, or
            has another architecture or other data than the first.
    """
    places = [os.path.realpath(path) for path in paths]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UsageError(f"{paths[number]}: is given twice")
    states = [load(path) for path in paths]
    weights = [_weights(state, path, ema) for state, path in zip(states, paths, strict=True)]
    for path, other in zip(paths, weights, strict=True):
        _check_alike(paths[0], weights[0], path, other)
    newest = max(range(len(states)), key=lambda index: (updates_of(states[index]), index))
    extra = dict(states[newest].get("extra_state") or {})
    for name in ("ema", "ema_fp32_params", "best"):
        extra.pop(name, None)
    extra |= {"val_loss": None, "averaged": [str(path) for path in paths]}
    model = _mean(weights, newest, paths)
    return {**states[newest], "model": model, "extra_state": extra, "last_optimizer_state": None}


def save(state: dict, path: str | Path) -> None:
    """Writes a checkpoint to a temporary file and renames it. Raises UsageError if that is refused."""
    checkpoints.write(state, path)


def _files(directory: str | Path) -> list[Path]:
    try:
        return sorted(Path(directory).iterdir())
    except OSError as error:
        raise UsageError(f"{directory}: cannot be read ({error.strerror})") from error


def _weights(state: dict, path, ema: bool) -> dict[str, torch.Tensor]:
    extra = state.get("extra_state") or {}
    weights = extra.get("ema") if ema else state["model"]
    if weights is None:
        raise UsageError(f"--ema: {path} holds no such weights; train with --store-ema")
    if ema and isinstance(weights, dict):
        # Those of a model in 16 bits, before they were rounded.
        exact = extra.get("ema_fp32_params") or {}
        weights = {name: exact.get(name, weight) for name, weight in weights.items()}
    if not isinstance(weights, dict) or not all(isinstance(one, torch.Tensor) for one in weights.values()):
        raise UsageError(f"checkpoint {path}: its model is not a table of tensors")
    return weights


def _check_alike(first, expected: dict, path, weights: dict) -> None:
    advice = "only models of one architecture and vocabulary can be averaged"
    for name in (*expected, *weights):
        if name not in weights or name not in expected:
            here, elsewhere = (path, first) if name in weights else (first, path)
            raise UsageError(f"{here} has {name} and {elsewhere} does not; {advice}")
        one, other = expected[name], weights[name]
        if one.shape != other.shape:
            raise UsageError(
                f"{name} has shape {tuple(other.shape)} in {path} and {tuple(one.shape)} in {first}; {advice}"
            )
        if name.rpartition(".")[2] in _OF_THE_DATA and not torch.equal(one, other):
            raise UsageError(f"{path} and {first} were trained on different data: their {name} differ")


def _mean(weights: list[dict], newest: int, paths: Sequence[str | Path]) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    # Weights that a model shares remain shared.
    shared: dict[tuple, torch.Tensor] = {}
    for name, kept in weights[newest].items():
        tensors = [table[name] for table in weights]
        place = tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)
        if place not in shared or not kept.numel():
            shared[place] = _mean_of(name, tensors, newest, paths)
        result[name] = shared[place]
    return result


def _mean_of(name: str, tensors: list[torch.Tensor], newest: int, paths) -> torch.Tensor:
    kept = tensors[newest]
    if not kept.is_floating_point():
        return kept.clone()
    total = torch.zeros(kept.shape, dtype=torch.float64)
    for tensor, path in zip(tensors, paths, strict=True):
        if not tensor.isfinite().all():
            raise UsageError(f"{path} is of a run that diverged: {name} holds NaN or infinite numbers")
        total += tensor
    return (total / len(tensors)).to(kept.dtype)
