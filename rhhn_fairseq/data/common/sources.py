"""Sources of text: plain and packed files, archives and memory, read as chunks of bytes."""

import codecs
import gzip
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import readable, tar_files

CHUNK = 1 << 20
TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz")
ARCHIVE_SUFFIXES = (".zip", *TAR_SUFFIXES)


@dataclass(frozen=True)
class FileSource:
    """A file: plain, .gz, .zip, or the member of a tar or zip archive, which may be a .gz as well.

    member: its name, with or without its folders. Without it a .zip must hold exactly one file.
    """

    path: Path
    member: str | None = None

    @property
    def name(self) -> str:
        """How messages and the manifest name it."""
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yields the unpacked bytes [start, stop) in chunks. Raises UsageError if they cannot be read."""
        with self._opened() as file:
            remaining = float("inf") if stop is None else stop - start
            # A tar archive is read as a stream, which cannot seek.
            while start and (skipped := file.read(min(CHUNK, start))):
                start -= len(skipped)
            while remaining > 0 and (chunk := file.read(min(CHUNK, remaining))):
                yield chunk
                remaining -= len(chunk)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        with readable(self.name), ExitStack() as stack:
            if self.path.name.endswith(ARCHIVE_SUFFIXES):
                members = stack.enter_context(closing(archive_members(self.path)))
                file = stack.enter_context(self._find(members))
            else:
                file = stack.enter_context(self.path.open("rb"))
            if (self.member or self.path.name).endswith(".gz"):
                file = stack.enter_context(gzip.GzipFile(fileobj=file))
            yield file

    def _find(self, members: Iterator[tuple[str, Callable[[], BinaryIO]]]) -> BinaryIO:
        for name, open_member in members:
            if self.member in (None, name, PurePosixPath(name).name):
                file = open_member()
                if self.member is None and next(members, None):
                    raise UsageError(f"{self.path}: holds several files; a .zip of one file is expected")
                return file
        raise UsageError(f"{self.path}: the archive has no {self.member or 'file'}")


def archive_members(path: Path) -> Iterator[tuple[str, Callable[[], BinaryIO]]]:
    """Yields the files of a .zip or tar archive, each with its name and a function that opens it.

    A tar archive is read from front to back, because every step backwards would unpack it from its start;
    so a file must be read before the next is asked for.
    """
    if path.name.endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir():
                    yield entry.filename, partial(archive.open, entry)
        return
    with tarfile.open(path, "r|*") as archive:
        for entry in tar_files(archive):
            yield entry.name, partial(archive.extractfile, entry)


@dataclass(frozen=True)
class MemorySource:
    """Bytes that no single file holds, such as the concatenated standard library."""

    name: str
    data: bytes

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yields the bytes [start, stop) in one chunk."""
        yield self.data[start:stop]


Source = FileSource | MemorySource


def user_file(path: str | Path) -> FileSource:
    """Returns a text file named by the user. Raises UsageError unless it is a file that can be re-read."""
    path = Path(path)
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such file; directories and pipes are not read")
    if path.name.endswith(TAR_SUFFIXES):
        raise UsageError(f"{path}: is an archive; unpack it first")
    return FileSource(path)


def check_directory(path: str | Path, option: str = "--from-dir") -> None:
    """Raises UsageError, naming the option, unless there is a directory at ``path``."""
    if not os.path.isdir(path):
        raise UsageError(f"{option} {path}: is no directory")


def find_in_directory(directory: Path, name: str) -> FileSource:
    """Finds the file ``name`` in a directory: plain, .gz, .zip, or a member of an archive there.

    Raises UsageError if there is none, or if several archives or members hold it.
    """
    directory = Path(directory)
    check_directory(directory)
    for suffix in ("", ".gz", ".zip"):
        path = directory / (name + suffix)
        if os.path.isfile(path):
            return FileSource(path)
    matches = []
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name.endswith(ARCHIVE_SUFFIXES):
            with readable(str(path)):
                members = [member for member, _ in archive_members(path)]
            matches += [FileSource(path, member) for member in members if PurePosixPath(member).name == name]
    if not matches:
        raise UsageError(
            f"--from-dir {directory}: has no {name}, plain, packed as .gz or .zip, or in a .tgz, "
            ".tar or .zip archive"
        )
    if len(matches) > 1:
        names = ", ".join(source.name for source in matches)
        raise UsageError(f"--from-dir {directory}: has {name} more than once ({names})")
    return matches[0]


def next_character(source: Source, position: int) -> int:
    """Returns the first byte offset at or after ``position`` where a UTF-8 character begins."""
    window = b"".join(source.chunks(position, position + 4))
    for step, byte in enumerate(window):
        if not 0x80 <= byte < 0xC0:
            return position + step
    return position + len(window)


def read_codes(
    source: Source, mode: str, start: int = 0, stop: int | None = None, errors: str = "strict"
) -> Iterator[np.ndarray]:
    """Yields the symbols of bytes [start, stop) of a source, chunk by chunk, unsigned integers [T].

    They are byte values in bytes mode, else code points. Nothing is translated: newlines are not
    converted, and a byte order mark is a character like any other.

    Args:
        errors: what text mode does about bytes that are not UTF-8: "strict", or "replace", which reads
            U+FFFD in their place.

    Raises:
        UsageError: text mode meets a NUL byte, or under "strict" something that is not UTF-8; the message
            names the source and the byte.
    """
    if mode == "bytes":
        for chunk in source.chunks(start, stop):
            yield np.frombuffer(chunk, dtype=np.uint8)
        return
    # It keeps the bytes of a character that the next chunk completes.
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    for chunk in chain(source.chunks(start, stop), (b"",)):
        held = len(decoder.getstate()[0])
        fault, place = "NUL", chunk.find(b"\0")
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            if not 0 <= place < error.start - held:
                fault, place = "not UTF-8", error.start - held
        if fault != "NUL" or place >= 0:
            advice = "" if fault == "NUL" else ", and --errors replace reads U+FFFD there"
            raise UsageError(
                f"{source.name}: byte {start + place} is {fault}, so this is not text; "
                f"--bytes takes any file, byte by byte{advice}"
            )
        start += len(chunk)
        if text:
            yield text_codes(text)


def text_codes(text: str) -> np.ndarray:
    """Returns the code points of a str, unsigned integers [T]."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
