r"""Text files as translation reads and writes them: one sentence a line, and never a line more or less.

Lines end at ``\n`` and nowhere else. Python's own reading of text also ends them at ``\r``, and
``str.splitlines`` at U+2028, U+0085 and others, which do occur inside sentences; a hypothesis would then
be compared with another sentence's reference.
"""

import os
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rhhn_fairseq.data.parallel.lines import LONGEST_LINE, lines
from rhhn_fairseq.errors import UsageError

CHUNK = 1 << 16

# A line that comes alone waits for so many seconds; a program that writes many has written them by then.
PATIENCE = 0.05


def decode_lines(file: BinaryIO, name: str, errors: str = "strict") -> Iterator[str]:
    r"""The lines of a binary file as text, without their ends (``\n`` or ``\r\n``) and a byte order mark.

    A line is there as soon as its end has been read, and nothing before it is kept, so the file may be a
    terminal or a pipe without end.

    Args:
        name: what messages call it. errors: strict, or replace, which puts U+FFFD in the place of what is
            not UTF-8.

    Raises:
        UsageError: a line is not UTF-8 and ``errors`` is strict, or is too long to be one, or the file
            cannot be read.
    """
    return _decode_chunks(_Arrivals(file), name, errors)


def decode_batches(
    file: BinaryIO, name: str, size: int, errors: str = "strict", patience: float = PATIENCE
) -> Iterator[list[str]]:
    """As ``decode_lines``, in lists of at most ``size`` lines, none of which waits for lines to come.

    A list ends where no further line is ready ``patience`` seconds after its first. Files on disk, and all
    that comes quickly, are so read in full lists.
    """
    chunks = _Arrivals(file)
    batch: list[str] = []
    taken, deadline = 0, 0.0
    try:
        for line in _decode_chunks(chunks, name, errors):
            if not batch:
                deadline = time.monotonic() + patience
            batch.append(line)
            taken += 1
            if len(batch) == size or (taken == chunks.lines and not chunks.ready(deadline)):
                ready_batch, batch = batch, []
                yield ready_batch
    except UsageError:
        # The lines before one that is no text are answered first.
        if batch:
            yield batch
        raise
    if batch:
        yield batch


class _Arrivals:
    """The chunks of a binary file, and whether another line has come.

    Attributes:
        lines: how many lines end in the chunks that were taken.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._waiting: deque[bytes] = deque()
        self._ended = False
        self.lines = 0

    def __iter__(self) -> Iterator[bytes]:
        while self._waiting or self._read():
            chunk = self._waiting.popleft()
            self.lines += chunk.count(b"\n")
            yield chunk

    def ready(self, deadline: float) -> bool:
        """Whether the end of a line or of the file comes until a moment of ``time.monotonic``."""
        try:
            descriptor = self._file.fileno()
        except (AttributeError, OSError, ValueError):
            # What is in memory is never waited for.
            return True
        # ``read1`` leaves nothing in Python's buffer, which ``select`` would not know of.
        while not self._ended and b"\n" not in (self._waiting[-1] if self._waiting else b""):
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            self._read()
        return True

    def _read(self) -> bool:
        chunk = b"" if self._ended else self._file.read1(CHUNK)
        self._ended = not chunk
        if chunk:
            self._waiting.append(chunk)
        return not self._ended


def _decode_chunks(chunks: Iterable[bytes], name: str, errors: str) -> Iterator[str]:
    try:
        for number, line in enumerate(lines(chunks), start=1):
            if line is None:
                raise UsageError(
                    f"{name}: line {number} has more than {LONGEST_LINE:,} bytes, no sentence has"
                )
            yield _decode(line, errors, f"{name}: line {number}")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror or error})") from error


def _decode(line: bytes, errors: str, name: str) -> str:
    try:
        return line.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the line, 0x{line[error.start]:02x}"
        raise UsageError(f"{name} is not UTF-8 ({byte})") from error


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """A file open for reading bytes. Raises UsageError if it cannot be opened."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        yield file


def read_lines(path: str | Path) -> list[str]:
    """All lines of a text file. Raises UsageError if it cannot be read, is empty or is not UTF-8."""
    with opened(path) as file:
        lines = list(decode_lines(file, str(path)))
    if not lines:
        raise UsageError(f"{path}: is empty")
    return lines


def count_lines(path: str | Path) -> int:
    """The number of lines of a file, the last of which may lack its end."""
    with opened(path) as file:
        return sum(1 for _ in lines(iter(lambda: file.read1(CHUNK), b"")))


def one_line(text: str) -> str:
    """The text with a space for whatever any program might take for the end of a line."""
    return " ".join(text.splitlines())


def check_output(option: str, path: str | Path | None, inputs: Iterable[str | Path | None]) -> None:
    """Raises UsageError if a file to write is one of those that are read, whatever link leads there."""
    # /dev/null and the like are read and written as often as anybody wants.
    if path is None or (os.path.exists(path) and not os.path.isfile(path)):
        return
    for given in filter(None, inputs):
        same = os.path.realpath(path) == os.path.realpath(given)
        if same or (os.path.exists(path) and os.path.exists(given) and os.path.samefile(path, given)):
            raise UsageError(f"{option} {path}: is the file {given} that is read; name another")


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path`` when the context ends well, and not before.

    It is filled beside ``path`` and renamed. What is no regular file, such as /dev/null or a pipe, has no
    place to take and is written directly.

    Raises:
        UsageError: the file system refuses, for instance because the disk is full.
    """
    # A link stays a link: what it leads to is replaced.
    place = Path(os.path.realpath(path))
    if os.path.islink(place):
        raise UsageError(f"{path}: cannot be written (it is a link that leads to itself)")
    direct = place.exists() and not place.is_file()
    stage = place if direct else place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        with open(stage, "wb") as file:
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
