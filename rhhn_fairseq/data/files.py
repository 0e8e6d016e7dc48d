"""Files that are none: pipes and devices, which a reader would wait for or read without end."""

import os
import stat
from pathlib import Path

from rhhn_fairseq.errors import UsageError


def refuse_endless(path: str | Path) -> None:
    """Raises UsageError for a pipe, a socket or a device. What is missing is left to whoever opens it."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError(f"{path}: is a pipe or a device, not a file")
