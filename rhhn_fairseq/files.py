r"""The package's one reader, one writer and one lock of files, and text by lines.

Files that the user names are opened without hanging and read within limits. Files are replaced whole, never
written through a link. Lines end only at ``\n`` or ``\r\n``: Python's text mode also splits them at ``\r``,
and ``str.splitlines`` at U+2028, U+0085 and others, which do occur inside sentences; a translation would then
be compared with another sentence's.
"""

import errno
import json
import logging
import lzma
import os
import secrets
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from rhhn_fairseq.errors import UsageError

logger = logging.getLogger(__name__)

# Configurations and manifests have a few kilobytes, JSON files of the corpora at most a few megabytes.
LARGEST_JSON = 64 << 20

LONGEST_LINE = 1 << 20
"""Bytes of the longest line that is read; a longer line is not a sentence and may not fit into memory."""

CHUNK = 1 << 20

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading bytes; any error while it is read becomes a one-line UsageError.

    Devices, pipes and directories are refused, because a device may never end and a pipe may never begin.

    Raises:
        UsageError: there is no such file, it is not a regular file, or it cannot be read.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    with readable(str(path)), open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UsageError(f"{path}: is no regular file")
        yield file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def refuse_endless(path: str | Path) -> None:
    """Raises UsageError for a pipe, a socket or a device. A missing file is not an error here."""
    # For a path without access rights os.path returns False, where Path raises.
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UsageError(f"{path}: is no regular file")


def read_regular(path: str | Path, limit: int) -> bytes:
    """Returns the content of a regular file of at most ``limit`` bytes. Raises UsageError."""
    with open_regular(path) as file:
        return read_within(file, limit, str(path))


def read_within(file: BinaryIO, limit: int, name: str) -> bytes:
    """Returns the rest of an open file; UsageError, which names ``name``, if it exceeds ``limit`` bytes."""
    # Sizes reported by a file system or an archive may be wrong, so the bytes themselves are counted.
    content = file.read(limit + 1)
    if len(content) > limit:
        raise UsageError(f"{name}: has more than {limit:,} bytes, the most that is read")
    return content


def read_json(path: str | Path, advice: str = "") -> object:
    """Returns the content of a JSON file.

    Args:
        advice: added to the message if the file is not JSON.

    Raises:
        OSError: there is no such file. UsageError: it cannot be read, or is not JSON.
    """
    os.lstat(path)
    try:
        return json.loads(read_regular(path, LARGEST_JSON).decode("utf-8"))
    except UsageError:
        raise
    # JSONDecodeError and UnicodeDecodeError are ValueErrors; the parser recurses for each bracket.
    except (ValueError, RecursionError) as error:
        reason = "its brackets are nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path}: is not JSON ({reason}){'; ' + advice if advice else ''}") from error


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns errors while a file or an archive is read into a one-line UsageError that names ``name``."""
    try:
        yield
    except UsageError:
        raise
    except OSError as error:
        # gzip's own errors have no strerror.
        raise UsageError(f"{name}: cannot be read ({error.strerror or error})") from error
    # A wrong length in a tar header is a ValueError, an encrypted member of a .zip a RuntimeError.
    except (
        EOFError,
        OverflowError,
        RuntimeError,
        ValueError,
        lzma.LZMAError,
        struct.error,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        # tarfile lists the error of each compression method, one per line.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{name}: is cut off or damaged ({reason})") from error


def tar_files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the regular files in an open tar archive, in their order.

    Raises:
        EOFError: the archive ends without the block of zeros that marks the end. tarfile itself accepts an
            archive that is cut off between two files as complete.
    """
    yield from (entry for entry in archive if entry.isfile())
    if archive.fileobj.tell() < archive.offset + tarfile.BLOCKSIZE:
        raise EOFError("it ends without its end mark")


def lines(chunks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yields the lines of a text, without their ends and without a byte order mark before the first.

    None stands for a line longer than ``LONGEST_LINE``; the rest of such a line is skipped.
    """
    text = _lines(chunks)
    for first in text:
        yield first and first.removeprefix(_BYTE_ORDER_MARK)
        yield from text


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes | None]:
    rest = b""
    too_long = False
    for chunk in chunks:
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            # The end of a line that was already reported as None.
            if not too_long:
                yield None if len(line) > LONGEST_LINE else line.removesuffix(b"\r")
            too_long = False
        if len(rest) > LONGEST_LINE:
            # Reported now and not at the line's end, which may never come.
            if not too_long:
                yield None
            rest, too_long = b"", True
    if rest and not too_long:
        yield rest.removesuffix(b"\r")


def decode_batches(file: BinaryIO, name: str, size: int, errors: str = "strict") -> Iterator[list[str]]:
    """Yields a file's lines as text in lists of at most ``size``, without waiting for a list to fill.

    A list ends with the last line that has arrived, so the file may be a terminal or an endless pipe. What
    arrives while a list is worked on is in the next ones.

    Args:
        name: the file's name in messages. errors: strict, or replace, which puts U+FFFD in place of bytes
            that are not UTF-8.

    Raises:
        UsageError: a line is not UTF-8 and ``errors`` is strict, or is too long, or the file cannot be read.
    """
    chunks = _Chunks(file)
    batch: list[str] = []
    taken = 0
    try:
        for line in _decode_chunks(chunks, name, errors):
            batch.append(line)
            taken += 1
            if len(batch) == size or taken == chunks.lines:
                ready_batch, batch = batch, []
                yield ready_batch
    except UsageError:
        # The lines before an invalid one are yielded first.
        if batch:
            yield batch
        raise
    if batch:
        yield batch


class _Chunks:
    """Iterates over the chunks of a binary file as they arrive; ``lines`` of them have ended so far."""

    def __init__(self, file: BinaryIO):
        self._file, self.lines = file, 0

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self._file.read1(CHUNK):
            self.lines += chunk.count(b"\n")
            yield chunk


def _decode_chunks(chunks: Iterable[bytes], name: str, errors: str) -> Iterator[str]:
    try:
        for number, line in enumerate(lines(chunks), start=1):
            if problem := line_problem(line, errors):
                raise UsageError(f"{name}: line {number} {problem}")
            yield line.decode("utf-8", errors)
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror or error})") from error


def line_problem(line: bytes | None, errors: str = "strict") -> str | None:
    """Returns why one of ``lines`` is no text, or None."""
    if line is None:
        return f"has more than {LONGEST_LINE:,} bytes, no sentence has"
    try:
        line.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {error.start + 1} of the line, 0x{line[error.start]:02x})"
    return None


def read_lines(path: str | Path) -> list[str]:
    """Returns all lines of a text file. Raises UsageError if it is empty or is not UTF-8."""
    with open(path, "rb") as file:
        found = list(_decode_chunks(_Chunks(file), str(path), "strict"))
    if not found:
        raise UsageError(f"{path}: is empty")
    return found


def count_lines(path: str | Path) -> int:
    """Returns the number of lines of a file; the last one may lack its line end."""
    with open(path, "rb") as file:
        return sum(1 for _ in lines(_Chunks(file)))


def one_line(text: str) -> str:
    """Returns the text with a space in place of everything that any program may take for a line end."""
    return " ".join(text.splitlines())


def check_output(option: str, path: str | Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Checks the name of a file to write before anything is computed.

    Raises:
        UsageError: it is empty, is a directory or lies in none, or it is also one of the inputs, even through
            links.
    """
    if path is None:
        return
    if path == "":
        raise UsageError(f"{option} is empty, name a file")
    folder = Path(os.path.realpath(path)).parent
    if os.path.isdir(path):
        raise UsageError(f"{option} {path} is a directory, name a file")
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {folder}")
    # /dev/null and the like may be both read and written.
    if os.path.exists(path) and not os.path.isfile(path):
        return
    for given in filter(None, inputs):
        same = os.path.realpath(path) == os.path.realpath(given)
        if same or (os.path.exists(path) and os.path.exists(given) and os.path.samefile(path, given)):
            raise UsageError(f"{option} {path}: is the file {given} that is read; name another")


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
