r"""Text files as translation reads and writes them: one sentence per line, never a line more or less.

Lines end only at ``\n``. Python's text mode also splits them at ``\r``, and ``str.splitlines`` at U+2028,
U+0085 and others, which do occur inside sentences; a hypothesis would then be compared with the reference
of another sentence.
"""

import os
import select
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rhhn_fairseq.data.parallel.lines import LONGEST_LINE, lines
from rhhn_fairseq.errors import UsageError

CHUNK = 1 << 16

# Seconds that a single line waits for more; a program that writes many lines has written them by then.
PATIENCE = 0.05


def decode_lines(file: BinaryIO, name: str, errors: str = "strict") -> Iterator[str]:
    r"""Yields the lines of a binary file as text, without line ends (``\n`` or ``\r\n``) or byte order mark.

    Each line is yielded as soon as its end has been read, and earlier ones are not kept, so the file may be
    a terminal or an endless pipe.

    Args:
        name: the file's name in messages. errors: strict, or replace, which puts U+FFFD in place of bytes
            that are not UTF-8.

    Raises:
        UsageError: a line is not UTF-8 and ``errors`` is strict, or is too long, or the file cannot be
            read.
    """
    return _decode_chunks(_Arrivals(file), name, errors)


def decode_batches(
    file: BinaryIO, name: str, size: int, errors: str = "strict", patience: float = PATIENCE
) -> Iterator[list[str]]:
    """Yields the lines of ``decode_lines`` in lists of at most ``size``, without waiting for a list to fill.

    A list ends if no further line is ready ``patience`` seconds after its first. So files on disk, and
    input that arrives quickly, are read in full lists.
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
        # The lines before an invalid one are yielded first.
        if batch:
            yield batch
        raise
    if batch:
        yield batch


class _Arrivals:
    """Iterates over the chunks of a binary file and knows whether another line has arrived.

    Attributes:
        lines: number of lines that end in the chunks returned so far.
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
        """Returns whether the end of a line or of the file arrives before a time of ``time.monotonic``."""
        try:
            descriptor = self._file.fileno()
        except (AttributeError, OSError, ValueError):
            # A file in memory is always ready.
            return True
        # ``read1`` leaves nothing in Python's buffer, which ``select`` does not see.
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
    """Opens a file for reading bytes. Raises UsageError if it cannot be opened."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        yield file


def read_lines(path: str | Path) -> list[str]:
    """Returns all lines of a text file. Raises UsageError if it cannot be read, is empty or is not UTF-8."""
    with opened(path) as file:
        lines = list(decode_lines(file, str(path)))
    if not lines:
        raise UsageError(f"{path}: is empty")
    return lines


def count_lines(path: str | Path) -> int:
    """Returns the number of lines of a file; the last one may lack its line end."""
    with opened(path) as file:
        return sum(1 for _ in lines(iter(lambda: file.read1(CHUNK), b"")))


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
