"""Child interpreters, which import nothing from the working directory."""

import sys


def interpreter(*arguments: str) -> list[str]:
    """Returns the command of a child interpreter, which imports nothing from the working directory.

    Without -P, a file ``numpy.py`` beside somebody's data would run.
    """
    return [sys.executable, "-P", *arguments]
