"""Profiles the time of an update: runs ``fairseq-train`` with a clock around every stage.

Times are exclusive: a nested stage counts only for itself. On a GPU the clock waits at every border until
the device is idle, so that work counts for the stage that launched it; nothing overlaps then.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from fairseq.data.iterators import GroupedIterator
from fairseq.logging.progress_bar import BaseProgressBar
from fairseq.trainer import Trainer
from fairseq_cli import train
from tqdm import tqdm

from rhhn_fairseq.bench.machine import describe_machine
from rhhn_fairseq.bench.report import Column
from rhhn_fairseq.cells.config import check_fields, option
from rhhn_fairseq.errors import UsageError

FORWARD, BACKWARD, OTHER = "forward and loss", "backward", "everything else"
MODEL = (FORWARD, BACKWARD)
OF_TRAINER = {
    "_prepare_sample": "batch to the device",
    "zero_grad": "clearing gradients",
    "_aggregate_logging_outputs": "statistics",
    "_reduce_and_log_stats": "statistics",
    "_check_grad_norms": "gradients between workers",
}
OF_OPTIMIZER = {
    "backward": BACKWARD,
    "all_reduce_grads": "gradients between workers",
    "multiply_grads": "scaling and clipping gradients",
    "clip_grad_norm": "scaling and clipping gradients",
    "step": "optimizer",
}

COLUMNS = (Column("part", "part"), Column("ms an update", "ms", ".2f"), Column("share %", "share", ".1f"))


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured; ``UsageError`` names a value that cannot work."""

    updates: int = option(20, help="timed updates", low=1)
    warm_up: int = option(5, help="warm-up updates before the timed ones", low=1)

    def __post_init__(self):
        check_fields(self)


class _Done(BaseException):
    """Ends the training; handlers of ordinary errors do not catch it."""


class Clock:
    """Seconds by stage; time counts for the innermost open stage.

    Attributes:
        cuda: whether to wait for the GPU before every reading of the clock.
        seconds: the time counted for each stage.
        tokens: target symbols that were trained on in that time.
    """

    def __init__(self, cuda: bool = False):
        self.cuda, self._open = cuda, [OTHER]
        self.restart()

    def restart(self) -> None:
        """Resets all times; open stages stay open."""
        self.seconds: dict[str, float] = {}
        self.tokens = 0
        self._since = self._now()

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def look(self) -> None:
        """Adds the time until now to the open stage."""
        now = self._now()
        stage = self._open[-1]
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.look()
        self._open.append(name)
        try:
            yield
        finally:
            self.look()
            self._open.pop()

    def timed(self, name: str, function: Callable) -> Callable:
        """Returns the function, timed as a stage."""

        @functools.wraps(function)
        def run(*args, **kwargs):
            with self.stage(name):
                return function(*args, **kwargs)

        return run


def run(config: Config, arguments: list[str]) -> dict:
    """Trains as ``fairseq-train`` with these arguments would, without saving or validating, and stops.

    Returns:
        a report for ``bench.report``.

    Raises:
        UsageError: the training ended before that many updates were done.
    """
    clock = Clock()
    more = ["--no-save", "--disable-validation"]
    argv = ["fairseq-train", *arguments, *(flag for flag in more if flag not in arguments)]
    total = config.warm_up + config.updates
    with (
        contextlib.ExitStack() as changed,
        tqdm(total=total, disable=None, leave=False, unit="update") as bar,
    ):
        for owner, name, value in _replacements(clock, config, bar):
            changed.enter_context(mock.patch.object(owner, name, value))
        changed.enter_context(mock.patch.object(sys, "argv", argv))
        try:
            train.cli_main()
        except _Done:
            return _report(clock, config, arguments)
    raise UsageError(
        f"the training ended before {config.warm_up} + {config.updates} updates were done, see --max-update "
        "and --max-epoch"
    )


def _replacements(clock: Clock, config: Config, bar: tqdm) -> Iterator[tuple]:
    """Yields the functions that fairseq's training calls, timed as stages: owner, name and function."""
    for name, stage in OF_TRAINER.items():
        yield Trainer, name, clock.timed(stage, getattr(Trainer, name))
    yield Trainer, "train_step", _counted(clock, config, bar, Trainer.train_step)
    yield GroupedIterator, "__next__", clock.timed("reading batches", GroupedIterator.__next__)
    yield train, "get_training_stats", clock.timed("log lines", train.get_training_stats)
    # Classes that only inherit ``log`` must not be timed twice.
    for kind in _subclasses(BaseProgressBar):
        if "log" in vars(kind):
            yield kind, "log", clock.timed("log lines", kind.log)


def _subclasses(base: type) -> list[type]:
    return [base, *(deeper for child in base.__subclasses__() for deeper in _subclasses(child))]


def _counted(clock: Clock, config: Config, bar: tqdm, train_step: Callable) -> Callable:
    """Returns a ``Trainer.train_step`` that also times a trainer's parts, and ends the training."""
    done = 0

    def step(trainer, samples, *args, **kwargs):
        nonlocal done
        if done == 0:
            clock.cuda = trainer.cuda
            for method, stage in OF_OPTIMIZER.items():
                setattr(trainer.optimizer, method, clock.timed(stage, getattr(trainer.optimizer, method)))
            criterion = trainer.get_criterion()
            criterion.forward = clock.timed(FORWARD, criterion.forward)
        result = train_step(trainer, samples, *args, **kwargs)
        done += 1
        clock.tokens += sum(sample["ntokens"] for sample in samples if sample)
        bar.update()
        clock.look()
        if done == config.warm_up:
            clock.restart()
        if done == config.warm_up + config.updates:
            raise _Done
        return result

    return step


def _report(clock: Clock, config: Config, arguments: list[str]) -> dict:
    total = sum(clock.seconds.values())
    rows = [
        {"part": stage, "ms": 1e3 * seconds / config.updates, "share": 100 * seconds / total}
        for stage, seconds in sorted(clock.seconds.items(), key=lambda pair: -pair[1])
    ]
    model = sum(clock.seconds.get(stage, 0.0) for stage in MODEL)
    device = "cuda" if clock.cuda else "cpu"
    return {
        "command": "train-profile",
        "machine": describe_machine(device),
        "settings": {"updates": config.updates, "warm_up": config.warm_up, "arguments": " ".join(arguments)},
        "rows": rows,
        "tokens": clock.tokens,
        "seconds": total,
        "notes": [
            f"The model ({' and '.join(MODEL)}) takes {100 * model / total:.1f} % of "
            f"{1e3 * total / config.updates:.1f} ms an update, "
            f"{clock.tokens / total:,.0f} target tokens a second."
        ],
    }
