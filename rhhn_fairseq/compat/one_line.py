"""Ends every program in one line: a UsageError with its own words, any other exception by one rule.

fairseq is not imported at the top of this module, so this also works when fairseq itself is missing.
"""

import functools
import os
import sys
import tempfile
import traceback

from rhhn_fairseq.errors import UsageError, printable

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

    The line says what the exception says, its kind, the module that raised it, and the file.
    """
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
    """Raises SystemExit with the line for an error; returns if a traceback is wanted."""
    if not wants_traceback():
        raise SystemExit(f"error: {message_of(error)}") from error
