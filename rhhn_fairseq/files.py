"""Reads files that the user names: opens them without hanging, reads within limits, and reports errors in one
line."""

import gzip
import json
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rhhn_fairseq.errors import UsageError

# Configurations and manifests have a few kilobytes, JSON files of the corpora at most a few megabytes.
LARGEST_JSON = 64 << 20
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a regular file for reading bytes; any error while it is read becomes a one-line UsageError.

    Devices, pipes and directories are refused, because a device may never end and a pipe may never begin.

    Raises:
        UsageError: there is no such file, it is not a regular file, or it cannot be read.
    """
    with readable(str(path)):
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise UsageError(
                f"{path}: is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, expected a file"
            )
        with open(descriptor, "rb") as file:
            yield file


def refuse_endless(path: str | Path) -> None:
    """Raises UsageError for a pipe, a socket or a device. A missing file is not an error here."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UsageError(f"{path}: is {_KINDS.get(stat.S_IFMT(mode), 'no regular file')}, expected a file")


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
        FileNotFoundError: there is no such file.
        UsageError: it cannot be read, or is not JSON.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
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
    except (
        EOFError,
        gzip.BadGzipFile,
        zlib.error,
        lzma.LZMAError,
        struct.error,
        tarfile.TarError,
        zipfile.BadZipFile,
        # A wrong length in a tar header, or a null character in a name.
        ValueError,
        OverflowError,
    ) as error:
        # tarfile lists the error of each compression method, one per line.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{name}: the archive is cut off or damaged ({reason})") from error
    # zipfile raises this for encrypted members and for methods it was built without.
    except RuntimeError as error:
        raise UsageError(f"{name}: cannot be unpacked ({error})") from error
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror or error})") from error


def tar_files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the regular files in an open tar archive, in their order.

    Raises:
        EOFError: the archive ends without the block of zeros that marks the end. tarfile itself accepts an
            archive that is cut off between two files as complete.
    """
    yield from (entry for entry in archive if entry.isfile())
    if archive.fileobj.tell() < archive.offset + tarfile.BLOCKSIZE:
        raise EOFError("it ends without its end mark")


def make_directory(path: Path) -> None:
    """Makes a directory and those above it. Raises UsageError if the file system refuses."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be made ({error.strerror or error})") from error
