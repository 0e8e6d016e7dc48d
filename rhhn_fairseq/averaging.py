"""The mean of the weights of several checkpoints of one training, which often translates or predicts better
than any of them (Vaswani et al. 2017, section 6.1).

Checkpoints are read as everywhere in the project: nothing but data comes out of them.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rhhn_fairseq.adaptations.checkpoints import WeightsOnlyTorch, allow_namespace
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.lines import replacing

EPOCH = re.compile(r"checkpoint(\d+)\.pt")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")
_BEST = re.compile(r"checkpoint\.best_(.+)_-?[\d.]+\.pt")
_LISTS = {"epoch": (EPOCH, "--save-interval"), "update": (UPDATE, "--save-interval-updates")}
ORDERS = tuple(_LISTS)

# Buffers that say what data a model was trained on.
_OF_THE_DATA = ("pieces_sha256", "symbol_codes", "statistics")


@dataclass(frozen=True)
class Score:
    """The figure by which fairseq compares the checkpoints of a training.

    Attributes:
        metric: its name, such as loss or bleu. value: of this checkpoint. maximised: larger is better.
        updates: after how many updates it was saved.
    """

    metric: str
    value: float
    maximised: bool
    updates: int


def last_checkpoints(directory: str | Path, number: int, by: str = "epoch") -> list[Path]:
    """The last checkpoints of a training, the newest last.

    Args:
        by: "epoch" for those that were saved after an epoch, "update" for those of --save-interval-updates.

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
    """The best checkpoints of a training by the figure that is stored in them, the best first.

    Looked at are those of epochs, of updates, and those that --keep-best-checkpoints names
    ``checkpoint.best_METRIC_VALUE.pt``.

    Args:
        metric: only checkpoints that were compared by it.

    Raises:
        UsageError: the directory has fewer of them, or they were compared by several metrics.
    """
    scores: dict[tuple[str, int], tuple[Score, Path]] = {}
    for path in _files(directory):
        if any(pattern.fullmatch(path.name) for pattern in (EPOCH, UPDATE, _BEST)):
            score = read_score(load(path))
            # fairseq saves one state under several names.
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
    """The figure that a checkpoint was compared by; None if it was saved without one."""
    value = (state.get("extra_state") or {}).get("val_loss")
    if not isinstance(value, (int, float)) or math.isnan(value):
        return None
    settings = state.get("cfg") or {}
    settings = settings.get("checkpoint", {}) if isinstance(settings, dict) else {}
    if not settings:
        # Checkpoints of fairseq's older models hold one list of all options.
        settings = vars(state.get("args") or object) if state.get("args") else {}
    return Score(
        str(settings.get("best_checkpoint_metric", "loss")),
        float(value),
        bool(settings.get("maximize_best_checkpoint_metric", False)),
        updates_of(state),
    )


def updates_of(state: dict) -> int:
    """After how many updates a checkpoint was saved, 0 where it does not say."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates", 0))


def load(path: str | Path) -> dict:
    """A checkpoint as fairseq stored it; its tensors stay in the file until they are asked for."""
    # fairseq's older models keep their options in one.
    allow_namespace()
    try:
        return WeightsOnlyTorch.load(str(path), map_location="cpu", mmap=True)
    except OSError as error:
        raise UsageError(f"checkpoint {path} cannot be read: {error.strerror or error}") from error


def average(paths: Sequence[str | Path], ema: bool = False) -> dict:
    """A checkpoint whose weights are the mean of those of several.

    Everything else is that of the newest, the one with most updates: its configuration, and its integer
    buffers. The optimizer's state and the validation result are left out, as they are not the mean's.

    Args:
        ema: average the weights that --store-ema keeps in place of the trained ones; of one checkpoint, these
            are taken as they are.

    Raises:
        UsageError: a checkpoint cannot be read, holds no such weights or weights that are not finite, or
            is of another architecture or other data than the first.
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
    """Writes a checkpoint beside its place, then renames it. Raises UsageError where that is refused."""
    with replacing(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # PyTorch's writer turns the error of the file into one of its own.
            raise OSError(None, "the file system refuses, is it full?") from error


def _files(directory: str | Path) -> list[Path]:
    try:
        return sorted(Path(directory).iterdir())
    except OSError as error:
        raise UsageError(f"{directory}: cannot be read ({error.strerror})") from error


def _weights(state: dict, path, ema: bool) -> dict[str, torch.Tensor]:
    weights = (state.get("extra_state") or {}).get("ema") if ema else state["model"]
    if weights is None:
        raise UsageError(f"--ema: {path} holds no such weights; train with --store-ema")
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
    # Tables that a model shares stay one table.
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
