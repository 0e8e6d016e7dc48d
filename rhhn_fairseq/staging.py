"""The one writer and the one lock of the package: files are replaced whole, never written through a link."""

import errno
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from rhhn_fairseq.errors import UsageError

logger = logging.getLogger(__name__)


@contextmanager
def replace_file(path: str | Path, follow: bool = True) -> Iterator[BinaryIO]:
    """Opens a file for writing that replaces ``path`` only when the context ends without an error.

    The content is written to a new file beside ``path``, which is then renamed.

    Args:
        follow: for names that the user gave. A link remains a link and its target is replaced; anything but a
            regular file, such as /dev/null or a pipe, is written directly. Otherwise a link is replaced.

    Raises:
        UsageError: the file system refuses, for instance because the disk is full.
    """
    place = Path(os.path.realpath(path) if follow else path)
    if follow and os.path.islink(place):
        raise UsageError(f"{path}: cannot be written (it is a link that leads to itself)")
    # For a name that is too long os.path returns False, where Path raises; opening it then says why.
    direct = follow and os.path.exists(place) and not os.path.isfile(place)
    stage = place if direct else place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
    try:
        # "x" opens neither an existing file nor a link.
        with open(stage, "wb" if direct else "xb") as file:
            yield file
        if not direct:
            stage.replace(place)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        if not direct:
            with suppress(OSError):
                stage.unlink()


def no_link(path: str, flags: int) -> int:
    """An ``opener`` for ``open`` that raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def lock(path: Path, refusal: str, wait: bool = False) -> Iterator[bool]:
    """Holds a lock within the context, which receives whether it was taken here.

    The operating system releases it when the process ends, however it ends, and forked processes do not
    inherit it. Nothing is locked if this thread holds it already, in a missing directory, or on a file
    system that is read-only or has no locks.

    Args:
        path: a file that is created here and removed at the end. Nothing is written to it.
        refusal: the message if another process holds the lock. wait: whether to log it and wait instead.

    Raises:
        UsageError: another process holds the lock, or the file is a link or a directory.
    """
    # The links to its directory are followed, but not the file itself.
    path = Path(os.path.realpath(path.parent), path.name)
    file = FileLock(path, timeout=0, is_singleton=True, fallback_to_soft=False)
    taken = not file.is_locked and os.path.isdir(path.parent) and _acquire(file, refusal, wait)
    try:
        yield taken
    finally:
        if taken and file.is_locked:
            # Before the release: whoever has opened it by then sees that it is gone, and starts over.
            with suppress(OSError):
                path.unlink()
            file.release()


def _acquire(file: FileLock, refusal: str, wait: bool) -> bool:
    try:
        file.acquire()
    except Timeout:
        if not wait:
            raise UsageError(refusal) from None
        logger.warning(refusal)
        file.acquire(timeout=-1)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            kind = "a link" if error.errno == errno.ELOOP else "a directory"
            raise UsageError(f"{file.lock_file}: is {kind}, expected a lock file; remove it") from error
        logger.debug("%s: cannot be locked (%s)", file.lock_file, error.strerror or error)
        return False
    return True
