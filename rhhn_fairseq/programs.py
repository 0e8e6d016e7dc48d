"""What surrounds a program's work: standard output, SIGTERM, and child interpreters.

Output is in UTF-8 and without control characters on a terminal. It may fail: standard output may be closed,
its disk full, or the reader of the pipe may have left. SIGTERM ends a program by an exception, as Ctrl-C
does, so that it can remove files and processes.
"""

import io
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rhhn_fairseq.errors import printable

CLOSED = "standard output is closed; send what is not wanted to /dev/null"


READER_LEFT = 128 + signal.SIGPIPE


class Output(io.FileIO):
    """Standard output; ends the program at the first write that fails, however deep in it that happens.

    If the reader leaves early, the program ends silently with the status of one killed by SIGPIPE. Everything
    after the failure is discarded, which Python would retry at exit, printing several lines of errors.
    """

    failed = False

    def write(self, content):
        if self.failed:
            return memoryview(content).nbytes
        try:
            return super().write(content)
        except OSError as error:
            self.failed = True
            if isinstance(error, BrokenPipeError):
                raise SystemExit(READER_LEFT) from None
            raise SystemExit(f"error: standard output: cannot be written ({error.strerror})") from None


class Screen(io.TextIOWrapper):
    """Text on a terminal, which obeys no control characters that come from a file or a model."""

    def write(self, text):
        super().write(printable(text))
        return len(text)


def open_on(stdout, output: Output, line_buffering: bool) -> io.TextIOWrapper:
    """Returns a text stream on ``output``, in UTF-8 whatever the locale says; it replaces ``stdout``."""
    stdout.flush()
    kind = Screen if stdout.isatty() else io.TextIOWrapper
    # What is no character, such as half of a surrogate pair, must not end a good run in a traceback.
    return kind(io.BufferedWriter(output), "utf-8", "backslashreplace", line_buffering=line_buffering)


class PlainRecord(logging.LogRecord):
    """A record of the log whose message has no control characters."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


@contextmanager
def own_output() -> Iterator[None]:
    """Replaces standard output with an ``Output`` within the context, if it has a file descriptor."""
    stdout = sys.stdout
    try:
        output = Output(stdout.fileno(), "wb", closefd=False)
    except (AttributeError, OSError, ValueError):
        yield
        return
    sys.stdout = open_on(stdout, output, stdout.line_buffering or stdout.write_through)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout = stdout


def end_with_failing_output() -> bool:
    """Replaces standard output with an ``Output`` in fairseq's programs.

    Without it a full disk behind standard output causes a traceback for each logged line, and with standard
    output closed the program computes in vain and ends with status 0. Every line is written at once, so that
    none is left when the program ends. A notebook's output is not changed.
    """
    if "fairseq_cli" not in sys.modules:
        return False
    logging.setLogRecordFactory(PlainRecord)
    stdout = sys.stdout
    if stdout is not sys.__stdout__:
        return False
    if stdout is None:
        raise SystemExit(f"error: {CLOSED}")
    sys.stdout = open_on(stdout, Output(stdout.fileno(), "wb", closefd=False), line_buffering=True)
    # fairseq sets up its log before it imports anything else.
    for handler in logging.getLogger().handlers:
        if getattr(handler, "stream", None) is stdout:
            handler.setStream(sys.stdout)
    return True


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM within ``interrupted_by_sigterm``."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """Returns 143 after SIGTERM, 130 after Ctrl-C."""
    # The shells' convention for a program that was ended by a signal.
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise Terminated, but only once, so that the clean-up is not interrupted again.

    Also works as a decorator. No effect outside of the main thread, which alone receives signals.
    """

    def terminate(signum, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interpreter(*arguments: str) -> list[str]:
    """Returns the command of a child interpreter, which imports nothing from the working directory.

    Without -P, a file ``numpy.py`` beside somebody's data would run.
    """
    return [sys.executable, "-P", *arguments]
