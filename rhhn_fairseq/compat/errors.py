"""How programs end: a UsageError with its own words, any other exception by one rule, both in one line.

fairseq is not imported at the top of this module, so this also works when fairseq itself is missing.
"""

import importlib
import math
import os
import sys
import tempfile
import traceback

from rhhn_fairseq.compat import trains_ours
from rhhn_fairseq.errors import UsageError, printable

FAIRSEQ = "fairseq-fixed==0.12.3.1"

# What precedes the error's message in a traceback that was turned into text.
MARK = f"{UsageError.__module__}.{UsageError.__qualname__}: "
LONGEST = 400
"""The most characters of an exception's own message that are shown."""


def message_of(error: BaseException) -> str:
    """Returns the line for an exception that ends a program."""
    return usage_message(error) or unexpected(error)


def usage_message(error: BaseException) -> str | None:
    """Returns the message of the first UsageError in the chain of causes and contexts; None without one.

    Data loader workers and spawned processes pass it on as text with a traceback.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        inner = waiting.pop(0)
        if inner is None or id(inner) in seen:
            continue
        seen.add(id(inner))
        if MARK in str(inner):
            return printable(str(inner).rsplit(MARK, 1)[1].splitlines()[0])
        if isinstance(inner, UsageError):
            return " ".join(str(inner).split())
        waiting += [inner.__cause__, inner.__context__]
    return None


def unexpected(error: BaseException) -> str:
    """Returns the line for an exception that no check foresaw, and writes its traceback to a file.

    The line says what the exception says, its kind, the module that raised it, and the file. A file that
    cannot be read or written needs no traceback.
    """
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.strerror:
        return printable(f"{error.filename}: {error.strerror}")
    names = {"prefix": "rhhn-", "suffix": ".traceback.txt", "delete": False}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="backslashreplace", **names) as file:
        traceback.print_exception(error, file=file)
    text = printable(" ".join(str(error).split()))[:LONGEST]
    kind = f"{type(error).__name__}, in {_raising_module(error)}"
    return f"{text} ({kind}); the traceback is in {file.name}".lstrip()


def _raising_module(error: BaseException) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = frames[-1].f_globals if frames else {}
    # ``python -m fairseq_cli.train`` runs that module under another name.
    name = names.get("__name__", "an unknown module")
    return getattr(names.get("__spec__"), "name", name) if name == "__main__" else name


def wants_traceback() -> bool:
    """Returns whether RHHN_TRACEBACK=1 asks for the usual traceback, for people who work on the code."""
    return os.environ.get("RHHN_TRACEBACK") == "1"


def install_excepthook() -> None:
    """Installs a hook that prints ``error: ...`` in fairseq's programs; the exit status remains 1.

    Ctrl-C prints ``interrupted``; the status is that of a program killed by SIGINT. Elsewhere, such as in
    a notebook, only an error that a UsageError caused becomes one line.
    """
    previous = sys.excepthook
    if getattr(previous, "prints_usage_errors", False):
        return

    def excepthook(kind, error, trace):
        message = None if wants_traceback() else usage_message(error)
        if message is None and "fairseq_cli" in sys.modules and not wants_traceback():
            message = unexpected(error) if isinstance(error, Exception) else None
            if isinstance(error, KeyboardInterrupt):
                print("interrupted", file=sys.stderr)
                return
        if message is None:
            previous(kind, error, trace)
        else:
            print(f"error: {message}", file=sys.stderr)

    excepthook.prints_usage_errors = True
    sys.excepthook = excepthook


def end_jobs_in_one_line() -> None:
    """fairseq-hydra-train never reaches the excepthook, because Hydra reports errors of its jobs itself.

    Such an error becomes a SystemExit, which Hydra does not catch, where Hydra reads what the job returned.
    """
    from hydra.core.utils import JobReturn

    inner = JobReturn.return_value

    def return_value(job):
        if isinstance(job._return_value, Exception) and not wants_traceback():
            raise SystemExit(f"error: {message_of(job._return_value)}") from job._return_value
        return inner.fget(job)

    JobReturn.return_value = property(return_value, inner.fset, inner.fdel, inner.__doc__)


def require_fairseq() -> None:
    """Raises UsageError, with what to install, without a fairseq that saves a task's state in checkpoints.

    fairseq 0.12.2, the last release under that name, does not, and cannot be imported on Python 3.11.
    """
    try:
        program = importlib.import_module("fairseq.checkpoint_utils").save_checkpoint.__code__
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"rhhn_fairseq needs {FAIRSEQ}: pip install {FAIRSEQ} ({error})") from error
    if "get_checkpoint_dict" not in program.co_names + program.co_consts:
        raise UsageError(f"rhhn_fairseq needs {FAIRSEQ}: pip uninstall fairseq, pip install {FAIRSEQ}")


# No model that learns has a loss of this many times that of the uniform distribution over the vocabulary.
# Weights with a standard deviation of 1, more than any initialisation uses, give a loss of a few hundred
# nats, one update with --lr 1e6 a loss above a million. Regression targets are of order 1.
ABSURD = 1000.0


def require_learning(trainer, figures: dict) -> None:
    """Ends a training of a model of this package whose loss is NaN or absurd; fairseq would train on.

    Args:
        figures: of an update, by name.

    Raises:
        UsageError: the training has diverged.
    """
    bounds = largest_losses(trainer.task) if trains_ours(trainer) else {}
    if "nll_loss" in figures:
        # With --sentence-avg, loss is a sum over a sentence. nll_loss is a mean over symbols.
        bounds.pop("loss", None)
    # Reading a number from a GPU synchronises, so it is done only when fairseq itself shows it.
    shown = trainer.get_num_updates() % trainer.cfg.common.log_interval == 0
    for name, bound in bounds.items():
        loss = figures.get(name)
        if loss is None or (getattr(loss, "is_cuda", False) and not shown):
            continue
        if not float(loss) <= bound:
            clip = trainer.cfg.optimization.clip_norm
            raise UsageError(
                f"training diverged in update {trainer.get_num_updates()}: {name} {float(loss):.4g} is above "
                f"{bound:.4g}, which no model that learns exceeds; try a lower --lr "
                f"(now {trainer.get_lr():g}) or a stronger --clip-norm (now {clip:g}, 0 is off)"
            )


def largest_losses(task) -> dict[str, float]:
    """Returns by name the losses beyond which training has diverged; in bits if there are classes."""
    classes = getattr(getattr(task, "problem", None), "classes", None)
    if not classes:
        try:
            classes = len(task.target_dictionary)
        except (NotImplementedError, TypeError):
            return {"mse": ABSURD**2, "nats_point": ABSURD**2}
    bound = ABSURD * math.log2(max(classes, 2))
    return {"nll_loss": bound, "loss": bound}
