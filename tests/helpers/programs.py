"""fairseq's programs in this process: what a command prints, and whether it ends well or in a line."""

import contextlib
import importlib
import io
import signal
import sys
from dataclasses import dataclass
from unittest import mock

import torch
from fairseq import checkpoint_utils
from fairseq.logging import metrics
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

from helpers.cli import HANGS
from rhhn_fairseq.compat.data import end_reading
from rhhn_fairseq.compat.errors import message_of

SECONDS = HANGS


@dataclass(frozen=True)
class Outcome:
    """How a program ended: it "works", is "refused" in a line, or "fails" with a traceback; and its text."""

    kind: str
    text: str


def run(program: str, arguments, stdin: str = "") -> Outcome:
    """``fairseq-<program> <arguments>``; the name as in ``fairseq_cli``."""
    module = importlib.import_module(f"fairseq_cli.{program}")
    metrics.reset()
    forget_best()
    forget_hydra()
    torch.manual_seed(0)
    output, errors = io.StringIO(), io.StringIO()
    line = [f"fairseq-{program}", *map(str, arguments)]
    try:
        with (
            mock.patch.object(sys, "argv", line),
            mock.patch.object(sys, "stdin", io.StringIO(stdin)),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
            limited(SECONDS),
        ):
            module.cli_main()
    except SystemExit as end:
        if not end.code:
            return Outcome("works", output.getvalue())
        # The interpreter prints a message that is given in place of a status.
        printed = end.code if isinstance(end.code, str) else errors.getvalue()
        return Outcome("refused", (printed.strip().splitlines() or [""])[-1])
    except Exception as error:
        return Outcome("refused", message_of(error))
    finally:
        # Later trainings of the process would take it for running.
        forget_hydra()
        # As at the end of a process; a loader that is collected as garbage waits five seconds for a worker.
        end_reading()
    return Outcome("works", output.getvalue())


def forget_hydra() -> None:
    """Hydra keeps its state and a program's configuration for the rest of the process."""
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


def forget_best() -> None:
    """fairseq keeps the best score of a process's trainings on the function that saves."""
    function = checkpoint_utils.save_checkpoint
    while function is not None:
        vars(function).pop("best", None)
        function = getattr(function, "__wrapped__", None)


@contextlib.contextmanager
def limited(seconds: int):
    """Raises TimeoutError in the main thread after so many seconds."""

    def stop(*_):
        raise TimeoutError(f"not done after {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
