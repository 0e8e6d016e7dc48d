"""One process at a time on a directory: a lock that ends with the process that holds it.

The lock is POSIX's (`lockf`), which the operating system takes back when the process ends, however it ends,
and which processes that it forks do not share. On a file system without locks, or one that cannot be
written, nothing is locked.
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

# The locks of this process. POSIX would grant it a second one, and the end of either would end both.
_mine: dict[Path, IO] = {}


def acquire(path: Path, refusal: str) -> bool:
    """Takes the lock file at ``path``; whether it has to be released, which it has not if nothing was locked.

    Args:
        path: is made, and removed by ``release``. Its directory exists.
        refusal: what is said if another process has the lock; who that is follows.

    Raises:
        UsageError: another process has the lock.
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
    """Gives the lock back and removes its file."""
    path = path.resolve()
    file = _mine.pop(path)
    with suppress(OSError):
        path.unlink()
    with suppress(OSError):
        file.close()


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Holds the lock as long as the context lasts. Arguments and errors are those of ``acquire``."""
    taken = acquire(path, refusal)
    try:
        yield
    finally:
        if taken:
            release(path)


def _open_locked(path: Path) -> IO:
    """The lock file, locked. Raises BlockingIOError if it is another's, OSError if it cannot be locked."""
    while True:
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed it between the two calls; then the name is free for another.
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
