"""SIGTERM ends a program as Ctrl-C does, by an exception, so that it can remove its files and processes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# A shell's convention for a program that a signal has ended.
_STATUS = 128


class Terminated(KeyboardInterrupt):
    """What SIGTERM raises where `interrupted_by_sigterm` is in force."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """143 after SIGTERM, 130 after Ctrl-C."""
    return _STATUS + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM raise Terminated, once: what the program does to end well is not interrupted again.

    Serves as a decorator too. Without effect outside of the main thread, which alone hears signals.
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
