"""Child interpreters, which import nothing from the working directory."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def interpreter(*arguments: str) -> list[str]:
    """Returns the command of a child interpreter, which imports nothing from the working directory.

    Without -P, a file ``numpy.py`` beside somebody's data would run.
    """
    return [sys.executable, "-P", *arguments]


@contextmanager
def safe_spawning() -> Iterator[None]:
    """Starts the processes of multiprocessing, whose command is its own, as ``interpreter`` does."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before
