"""Ends a program in one line for a UsageError, however deep in the program it was raised.

fairseq is not imported at the top of this module, so this also works when fairseq itself is missing.
"""

import functools
import os
import sys

from rhhn_fairseq.adaptations.mistakes import describe
from rhhn_fairseq.errors import UsageError, printable

# What precedes the error's message in a traceback that was turned into text.
MARK = f"{UsageError.__module__}.{UsageError.__qualname__}: "


def usage_message(error: BaseException | None) -> str | None:
    """Returns the message of the first UsageError in the chain of causes and contexts, or None.

    fairseq wraps errors in a plain Exception, while data loader workers and spawned processes pass them
    on as text with a traceback; the message is found in all three forms. If there is no UsageError, the
    exception itself may be one of those that `mistakes` describes.
    """
    seen: set[int] = set()
    waiting, caught = [error], error
    while waiting:
        error = waiting.pop(0)
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        if MARK in str(error):
            return printable(str(error).rsplit(MARK, 1)[1].splitlines()[0])
        if isinstance(error, UsageError):
            return " ".join(str(error).split())
        waiting += [error.__cause__, error.__context__]
    described = None if caught is None else describe(caught)
    return described and printable(described)


def wants_traceback() -> bool:
    """Returns whether RHHN_TRACEBACK=1 asks for the usual traceback, for people who work on the code."""
    return os.environ.get("RHHN_TRACEBACK") == "1"


def install_excepthook() -> None:
    """Installs a hook that prints `error: <message>` for a UsageError; the exit status remains 1.

    In fairseq's programs, Ctrl-C prints `interrupted`; the status is that of a program killed by SIGINT. All
    other exceptions go to the previous hook.
    """
    previous = sys.excepthook
    if getattr(previous, "prints_usage_errors", False):
        return

    def excepthook(kind, error, traceback):
        message = usage_message(error) if isinstance(error, Exception) else None
        if isinstance(error, KeyboardInterrupt) and "fairseq_cli" in sys.modules and not wants_traceback():
            print("interrupted", file=sys.stderr)
        elif message is None or wants_traceback():
            previous(kind, error, traceback)
        else:
            print(f"error: {message}", file=sys.stderr)

    excepthook.prints_usage_errors = True
    sys.excepthook = excepthook


def end_hydra_in_one_line() -> bool:
    """fairseq-hydra-train never reaches the excepthook, because Hydra reports errors itself.

    An error of the configuration or of the job that Hydra would report becomes a SystemExit, which Hydra
    does not catch and which prints the one line. If this package is loaded only through --user-dir, Hydra
    is already running; then only the job's errors are caught, where its return value is read.
    """
    from hydra._internal import utils
    from hydra.core.utils import JobReturn

    report, inner = utils.run_and_report, JobReturn.return_value

    @functools.wraps(report)
    def run_and_report(func):
        def run():
            try:
                return func()
            except Exception as error:
                _end(error)
                raise

        return report(run)

    def return_value(job):
        if isinstance(job._return_value, Exception):
            _end(job._return_value)
        return inner.fget(job)

    utils.run_and_report = run_and_report
    JobReturn.return_value = property(return_value, inner.fset, inner.fdel, inner.__doc__)
    return True


def _end(error: Exception) -> None:
    """Raises SystemExit with the line for an error; returns if there is none."""
    message = None if wants_traceback() else usage_message(error)
    if message is not None:
        raise SystemExit(f"error: {message}") from error


def end_fp16_on_cpu_in_one_line() -> bool:
    """Training with --fp16 on a CPU ends in a traceback about CUDA, at once or when a gradient overflows.

    fairseq's loss scaling asks for the current GPU in both places.
    """
    from fairseq.optim import FP16Optimizer

    build = FP16Optimizer.build_optimizer.__func__

    @functools.wraps(build)
    def build_on_gpu(cls, cfg, params, **kwargs):
        params = list(params)
        if getattr(cfg.common, "fp16", False) and not any(parameter.is_cuda for parameter in params):
            raise UsageError("--fp16 trains on a GPU only; on a CPU use --bf16, or neither for float32")
        return build(cls, cfg, params, **kwargs)

    FP16Optimizer.build_optimizer = classmethod(build_on_gpu)
    return True
