"""Shows where the time of an update of fairseq-train goes, part by part.

Usage: python -m benchmarks.profile [--updates 20] [--warm-up 5] [--json FILE] -- ARGUMENTS

ARGUMENTS are those of fairseq-train. Trains with them for that many updates in this process; nothing is saved
or validated. Times are exclusive: a nested stage counts only for itself. On a GPU the clock waits at every
border until the device is idle, so that work counts for the stage that launched it; nothing overlaps then.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from fairseq.data.iterators import GroupedIterator
from fairseq.logging.progress_bar import BaseProgressBar
from fairseq.trainer import Trainer
from fairseq_cli import train

from benchmarks.machine import describe_machine
from benchmarks.report import show
from rhhn_fairseq.cli.parsers import StrictParser
from rhhn_fairseq.cli.running import run
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import check_output

FORWARD, BACKWARD, OTHER = "forward and loss", "backward", "everything else"
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


class _Done(BaseException):
    """Ends the training; handlers of ordinary errors do not catch it."""


class Clock:
    """Seconds by stage; time counts for the innermost open stage.

    Attributes:
        cuda: whether to wait for the GPU before every reading of the clock.
        seconds: the time counted for each stage. tokens: target symbols that were trained on in that time.
    """

    def __init__(self, cuda: bool = False):
        self.cuda, self._open = cuda, [OTHER]
        self.restart()

    def restart(self) -> None:
        """Resets all times; open stages stay open."""
        self.seconds: dict[str, float] = {}
        self.tokens, self._since = 0, self._now()

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def look(self) -> None:
        """Adds the time until now to the open stage."""
        now, stage = self._now(), self._open[-1]
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


def profile(updates: int, warm_up: int, arguments: list[str]) -> dict:
    """Trains as ``fairseq-train`` with these arguments would, without saving or validating; a report.

    Raises:
        UsageError: the training ended before that many updates were done.
    """
    clock = Clock()
    more = ["--no-save", "--disable-validation"]
    argv = ["fairseq-train", *arguments, *(flag for flag in more if flag not in arguments)]
    with contextlib.ExitStack() as changed:
        for owner, name, value in _replacements(clock, updates, warm_up):
            changed.enter_context(mock.patch.object(owner, name, value))
        changed.enter_context(mock.patch.object(sys, "argv", argv))
        try:
            train.cli_main()
        except _Done:
            return _report(clock, updates, arguments)
    raise UsageError(f"the training ended before {warm_up} + {updates} updates: see --max-update")


def _replacements(clock: Clock, updates: int, warm_up: int) -> Iterator[tuple]:
    """Yields the functions that fairseq's training calls, timed as stages: owner, name and function."""
    for name, stage in OF_TRAINER.items():
        yield Trainer, name, clock.timed(stage, getattr(Trainer, name))
    yield Trainer, "train_step", _counted(clock, updates, warm_up, Trainer.train_step)
    yield GroupedIterator, "__next__", clock.timed("reading batches", GroupedIterator.__next__)
    yield train, "get_training_stats", clock.timed("log lines", train.get_training_stats)
    # Classes that only inherit ``log`` must not be timed twice.
    for kind in (BaseProgressBar, *BaseProgressBar.__subclasses__()):
        if "log" in vars(kind):
            yield kind, "log", clock.timed("log lines", kind.log)


def _counted(clock: Clock, updates: int, warm_up: int, train_step: Callable) -> Callable:
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
        clock.look()
        if done == warm_up:
            clock.restart()
        if done == warm_up + updates:
            raise _Done
        return result

    return step


def _report(clock: Clock, updates: int, arguments: list[str]) -> dict:
    total = sum(clock.seconds.values())
    ordered = sorted(clock.seconds.items(), key=lambda pair: -pair[1])
    rows = [{"part": s, "ms an update": 1e3 * t / updates, "share %": 100 * t / total} for s, t in ordered]
    model = clock.seconds.get(FORWARD, 0.0) + clock.seconds.get(BACKWARD, 0.0)
    note = f"The model ({FORWARD} and {BACKWARD}) takes {100 * model / total:.1f} % of "
    note += f"{1e3 * total / updates:.1f} ms an update, {clock.tokens / total:,.0f} target tokens a second."
    return {
        "command": "profile",
        "machine": describe_machine("cuda" if clock.cuda else "cpu"),
        "settings": {"updates": updates, "arguments": " ".join(arguments)},
        "rows": rows,
        "tokens": clock.tokens,
        "seconds": total,
        "notes": [note],
    }


def main(argv=None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = StrictParser(prog="python -m benchmarks.profile", description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=20, help="timed updates (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=5, help="updates before them (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    parser.add_argument("arguments", nargs="+", help="what fairseq-train would get, after --")
    args = parser.parse_args(argv)
    if min(args.updates, args.warm_up) < 1:
        raise UsageError(f"--updates {args.updates} --warm-up {args.warm_up}: each must be at least 1")
    check_output("--json", args.json)
    show(profile(args.updates, args.warm_up, args.arguments), args.json)


if __name__ == "__main__":
    sys.exit(run(main))
