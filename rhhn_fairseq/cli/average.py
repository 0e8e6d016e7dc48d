"""Averages the weights of several checkpoints of one training.

Usage: %(prog)s checkpoints/gnmt --last 5 --output checkpoints/gnmt/average.pt
       %(prog)s checkpoints/gnmt --best 3 --output checkpoints/gnmt/average.pt
       %(prog)s a.pt b.pt --output average.pt

The mean often translates or predicts better than any of them (Vaswani et al. 2017, section 6.1). It is a
checkpoint for fairseq-generate, fairseq-eval-lm, fairseq-interactive and rhhn. Its configuration is that of
the newest, and it has no optimizer state.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rhhn_fairseq.cli.parsers import make_parser
from rhhn_fairseq.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

EPOCH = re.compile(r"checkpoint(\d+)\.pt")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")
BEST = re.compile(r"checkpoint\.best_(.+)_-?[\d.]+\.pt")
LISTS = {
    "epoch": (EPOCH, "--save-interval without --no-epoch-checkpoints"),
    "update": (UPDATE, "--save-interval-updates"),
}
# Buffers that identify the data a model was trained on.
OF_THE_DATA = ("pieces_sha256", "symbol_codes", "statistics")


class Score(NamedTuple):
    """The metric by which fairseq compares the checkpoints of a training run, after ``updates`` updates."""

    metric: str
    value: float
    maximised: bool
    updates: int


def main(argv=None) -> None:
    parser = make_parser("average", __doc__)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="CHECKPOINT", help="files, or with --last or --best their directory")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--last", type=int, metavar="N", help="the last N checkpoints of the directory")
    number.add_argument(
        "--best", type=int, metavar="N", help="the best N checkpoints, by the metric stored in them"
    )
    add("--by", choices=LISTS, help="what --last counts (default: epoch)")
    add("--metric", help="metric of --best, such as loss or bleu; needed if the checkpoints store several")
    add("--ema", action="store_true", help="average the weights that --store-ema keeps, not the trained ones")
    add("--output", required=True, metavar="FILE", help="the checkpoint to write")
    args = parser.parse_args(argv)
    for option, partner in (("metric", "best"), ("by", "last")):
        if getattr(args, option) is not None and getattr(args, partner) is None:
            raise UsageError(f"--{option} {getattr(args, option)} goes with --{partner}")

    from rhhn_fairseq.compat import checkpoints
    from rhhn_fairseq.files import check_output

    paths = select_checkpoints(args)
    check_output("--output", args.output, paths)
    checkpoints.write(average(paths, args.ema), args.output)
    for path in paths:
        print(f"averaged: {path}")
    print(f"written: {args.output}")


def select_checkpoints(args) -> list:
    """Returns the checkpoints to average."""
    if args.last is None and args.best is None:
        return args.inputs
    if len(args.inputs) != 1:
        raise UsageError("--last and --best take one directory of checkpoints")
    for option in ("last", "best"):
        if getattr(args, option) is not None and getattr(args, option) < 1:
            raise UsageError(f"--{option} {getattr(args, option)} is too small, the smallest is 1")
    if args.last is not None:
        return last_checkpoints(args.inputs[0], args.last, args.by or "epoch")
    return best_checkpoints(args.inputs[0], args.best, args.metric)


def last_checkpoints(directory: str | Path, number: int, by: str = "epoch") -> list[Path]:
    """Returns the last checkpoints of a training run, the newest last.

    Args:
        by: "epoch" for those saved after an epoch, "update" for those of --save-interval-updates.

    Raises:
        UsageError: the directory has fewer of them.
    """
    pattern, option = LISTS[by]
    found = [(match, path) for path in Path(directory).iterdir() if (match := pattern.fullmatch(path.name))]
    if len(found) < number:
        raise UsageError(
            f"--last {number}: {directory} has {len(found)} checkpoints by {by} ({option} writes them)"
        )
    return [path for _, path in sorted((int(match[1]), path) for match, path in found)[-number:]]


def best_checkpoints(directory: str | Path, number: int, metric: str | None = None) -> list[Path]:
    """Returns the best checkpoints of a training run by the metric stored in them, the best first.

    Candidates are the checkpoints of epochs and updates, and those that --keep-best-checkpoints names
    ``checkpoint.best_METRIC_VALUE.pt``.

    Args:
        metric: restricts the candidates to checkpoints that were compared by this metric.

    Raises:
        UsageError: the directory has fewer of them, or they were compared by several metrics.
    """
    scores: dict[tuple[str, int, float], tuple[Score, Path]] = {}
    for path in sorted(Path(directory).iterdir()):
        if not any(pattern.fullmatch(path.name) for pattern in (EPOCH, UPDATE, BEST)):
            continue
        score = read_score(load(path))
        # fairseq saves the same state under several names. Updates may begin again, by --reset-optimizer.
        if score is not None and metric in (None, score.metric):
            scores.setdefault((score.metric, score.updates, score.value), (score, path))
    metrics = sorted({name for name, *_ in scores})
    if len(metrics) > 1:
        raise UsageError(f"{directory}: has checkpoints by {' and by '.join(metrics)}; choose with --metric")
    if len(scores) < number:
        raise UsageError(
            f"--best {number}: {directory} has {len(scores)} checkpoints with a stored {metric or 'metric'} "
            "(--keep-best-checkpoints, --save-interval-updates, or --save-interval without "
            "--no-epoch-checkpoints writes them)"
        )
    ranked = sorted(scores.values(), key=lambda pair: -pair[0].value if pair[0].maximised else pair[0].value)
    return [path for _, path in ranked[:number]]


def read_score(state: dict) -> Score | None:
    """Returns the metric that a checkpoint was compared by; None if it was saved without one."""
    from rhhn_fairseq.compat.names import HIGHER_IS_BETTER

    value = (state.get("extra_state") or {}).get("val_loss")
    if not isinstance(value, (int, float)) or math.isnan(value):
        return None
    settings = (state.get("cfg") or {}).get("checkpoint") or {}
    metric = str(settings.get("best_checkpoint_metric", "loss"))
    maximised = metric in HIGHER_IS_BETTER or bool(settings.get("maximize_best_checkpoint_metric", False))
    return Score(metric, float(value), maximised, updates_of(state))


def updates_of(state: dict) -> int:
    """Returns after how many updates a checkpoint was saved; 0 if it does not say."""
    history = state.get("optimizer_history") or [{}]
    return int(history[-1].get("num_updates", 0))


def _age(state: dict) -> tuple[int, int]:
    """Returns how often a training was started, and its updates, which --reset-optimizer begins anew."""
    return len(state.get("optimizer_history") or ()), updates_of(state)


def load(path: str | Path) -> dict:
    """Loads a checkpoint as fairseq stored it; its tensors stay in the file until they are used."""
    from rhhn_fairseq.compat.checkpoints import WeightsOnlyTorch
    from rhhn_fairseq.files import refuse_endless

    refuse_endless(path)
    return WeightsOnlyTorch.load(str(path), map_location="cpu", mmap=True)


def average(paths: Sequence[str | Path], ema: bool = False) -> dict:
    """Returns a checkpoint whose weights are the mean of those of several checkpoints.

    Everything else, such as the configuration and integer buffers, is that of the newest, the one with most
    updates after the last restart. The optimizer's state and the validation result are omitted, as they do
    not belong to the mean.

    Args:
        ema: average the weights that --store-ema keeps instead of the trained ones; with one checkpoint,
            those are used as they are.

    Raises:
        UsageError: a checkpoint cannot be read, is given twice, holds no such weights or weights that are
            not finite, or has another architecture or other data than the first.
    """
    from rhhn_fairseq.compat import checkpoints

    places = [os.path.realpath(path) for path in paths]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UsageError(f"{paths[number]}: is given twice")
    states = [load(path) for path in paths]
    weights = [_weights(state, path, ema) for state, path in zip(states, paths, strict=True)]
    for path, other in zip(paths, weights, strict=True):
        for name in weights[0].keys() | other.keys():
            one, two = weights[0].get(name), other.get(name)
            if one is None or two is None or one.shape != two.shape:
                advice = "only models of one architecture and vocabulary can be averaged"
                raise UsageError(f"{path} and {paths[0]} differ in {name} or its shape; {advice}")
            if name.rpartition(".")[2] in OF_THE_DATA and not one.equal(two):
                what = f"their {name} differ"
                raise UsageError(f"{path} and {paths[0]} were trained on different data: {what}")
    newest = max(range(len(states)), key=lambda index: (*_age(states[index]), index))
    extra = dict(states[newest].get("extra_state") or {})
    for name in (*checkpoints.AVERAGES, "best"):
        extra.pop(name, None)
    extra |= {"val_loss": None, "averaged": [str(path) for path in paths]}
    model = _mean(weights, newest, paths)
    return {**states[newest], "model": model, "extra_state": extra, "last_optimizer_state": None}


def _weights(state: dict, path, ema: bool) -> dict[str, Tensor]:
    if not ema:
        return state["model"]
    extra = state.get("extra_state") or {}
    if extra.get("ema") is None:
        raise UsageError(f"--ema: {path} holds no such weights; train with --store-ema")
    # Those of a model in 16 bits, before they were rounded.
    return extra["ema"] | (extra.get("ema_fp32_params") or {})


def _mean(weights: list[dict], newest: int, paths: Sequence[str | Path]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    # Weights that a model shares remain shared.
    shared: dict[tuple, Tensor] = {}
    for name, kept in weights[newest].items():
        tensors = [table[name] for table in weights]
        place = tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)
        if place not in shared or not kept.numel():
            shared[place] = _mean_of(name, tensors, newest, paths)
        result[name] = shared[place]
    return result


def _mean_of(name: str, tensors: list[Tensor], newest: int, paths) -> Tensor:
    kept = tensors[newest]
    if not kept.is_floating_point():
        return kept.clone()
    total = kept.new_zeros(kept.shape).double()
    for tensor, path in zip(tensors, paths, strict=True):
        if not tensor.isfinite().all():
            raise UsageError(f"{path} is of a run that diverged: {name} holds NaN or infinite numbers")
        total += tensor
    return (total / len(tensors)).to(kept.dtype)
