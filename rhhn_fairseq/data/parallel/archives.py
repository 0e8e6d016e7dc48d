"""Reads text in the archives of the WMT tasks as a stream, never unpacking it whole."""

import gzip
import html
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import readable, tar_files

_CHUNK = 1 << 20
_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class ArchiveText:
    """A file in a tar archive, plain or packed.

    member: its name without folders; a .gz is unpacked, and the text of each <seg> of an .sgm is a line.
    """

    path: Path
    member: str

    @property
    def name(self) -> str:
        """How messages name it."""
        return f"{self.path}:{self.member}"

    def chunks(self) -> Iterator[bytes]:
        """Yields the text in chunks. Raises UsageError if it is not there or cannot be unpacked."""
        # "r|*" reads from front to back, in one pass, and detects the compression.
        with readable(self.name), tarfile.open(self.path, "r|*") as archive:
            for entry in tar_files(archive):
                if PurePosixPath(entry.name).name == self.member:
                    with closing(archive.extractfile(entry)) as file:
                        yield from _unpack(self.member, file)
                    return
        raise UsageError(f"{self.path}: the archive has no {self.member}")


def _unpack(name: str, file: BinaryIO) -> Iterator[bytes]:
    if name.endswith(".gz"):
        file = gzip.GzipFile(fileobj=file)
    if name.endswith(".sgm"):
        yield segments(file.read())
        return
    while block := file.read(_CHUNK):
        yield block


def segments(document: bytes) -> bytes:
    """Returns the text of every <seg> of an SGML document, one per line, resolving entities such as &amp;.

    Bytes that are not UTF-8 stay as they are.
    """
    text = document.decode("utf-8", "surrogateescape")
    cleaned = (" ".join(html.unescape(segment).split()) for segment in _SEGMENT.findall(text))
    return "".join(f"{segment}\n" for segment in cleaned).encode("utf-8", "surrogateescape")


def member_names(path: Path) -> set[str]:
    """Returns the names, without folders, of a tar archive's files. Raises UsageError if it is damaged."""
    with readable(str(path)), tarfile.open(path) as archive:
        return {PurePosixPath(entry.name).name for entry in tar_files(archive)}
