"""Admits one process at a time to a directory, by a lock that ends with the process that holds it.

The lock is a POSIX lock (`lockf`): the operating system releases it when the process ends, however it ends,
and forked processes do not inherit it. On a file system without locks, or a read-only one, nothing is
locked.
"""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rhhn_fairseq.errors import UsageError

logger = logging.getLogger(__name__)

_HELD = (errno.EACCES, errno.EAGAIN)

# The locks of this process. POSIX would grant a second one on the same file, and releasing either ends both.
_mine: dict[Path, IO] = {}


def acquire(path: Path, refusal: str) -> bool:
    """Locks the file at ``path``; returns whether it must be released, False if nothing was locked.

    Args:
        path: created here and removed by ``release``. Its directory must exist.
        refusal: the message if another process holds the lock; the holder is appended.

    Raises:
        UsageError: another process holds the lock.
    """
    path = path.resolve()
    if path in _mine:
        return False
    try:
        file = _open_locked(path)
    except BlockingIOError as error:
        raise UsageError(f"{refusal} ({_holder(path)})") from error
    except OSError as error:
        logger.debug("%s: cannot be locked (%s)", path, error.strerror or error)
        return False
    file.truncate(0)
    with suppress(OSError):
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    _mine[path] = file
    return True


def release(path: Path) -> None:
    """Releases the lock and removes its file."""
    path = path.resolve()
    file = _mine.pop(path)
    with suppress(OSError):
        path.unlink()
    with suppress(OSError):
        file.close()


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[bool]:
    """Holds the lock within the context, which receives whether it was taken; see ``acquire``."""
    taken = acquire(path, refusal)
    try:
        yield taken
    finally:
        if taken:
            release(path)


def _open_locked(path: Path) -> IO:
    """Returns the locked file. Raises BlockingIOError if another process has it, OSError if locking fails."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed it between the two calls; then another process can take the name.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except OSError as error:
            file.close()
            if error.errno in _HELD:
                raise BlockingIOError(error.errno, error.strerror) from error
            raise
        file.close()


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except OSError:
        return "another process"
