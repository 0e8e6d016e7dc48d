"""Makes SIGTERM end a program by an exception, as Ctrl-C does, so that it can remove files and processes."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# The shells' convention for a program that was ended by a signal.
_STATUS = 128


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM within `interrupted_by_sigterm`."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """Returns 143 after SIGTERM, 130 after Ctrl-C."""
    return _STATUS + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


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
