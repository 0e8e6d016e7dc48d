r"""Lines of text in two languages, read side by side in memory that does not grow.

A line ends with ``\n`` or ``\r\n`` and nowhere else: what other programs take for line ends (U+2028, a
lone ``\r``, a form feed) occurs inside sentences of web text, where a split would misalign the two sides.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from rhhn_fairseq.errors import UsageError

LONGEST_LINE = 1 << 20
"""Bytes of the longest line that is read; a longer line is not a sentence and may not fit into memory."""

RawPair = tuple[bytes | None, bytes | None]
"""Two lines without their ends; None stands for a line longer than ``LONGEST_LINE``."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Text(Protocol):
    """Text in one language.

    name: its name in messages. path: the file that holds it, packed or not, as it is stored.
    """

    name: str
    path: Path

    def chunks(self) -> Iterator[bytes]:
        """Yields the unpacked bytes in chunks. Raises UsageError if they cannot be read."""


class Pairs(Protocol):
    """Text in two languages.

    name: its name in the report. texts: where it comes from, if it comes from files.
    """

    name: str
    texts: tuple[Text, ...]

    def read(self) -> Iterator[RawPair]:
        """Yields the pairs of lines in order. Raises UsageError if the text cannot be read."""


@dataclass(frozen=True)
class TextPairs:
    """Two texts whose lines correspond: source and target."""

    name: str
    texts: tuple[Text, Text]

    def read(self) -> Iterator[RawPair]:
        """Yields the pairs of lines in order.

        Raises UsageError, with both numbers of lines, if one text has more of them than the other.
        """
        both = zip_longest(*(lines(text.chunks()) for text in self.texts), fillvalue=_AT_END)
        for number, (source, target) in enumerate(both):
            if source is _AT_END or target is _AT_END:
                longer = number + 1 + sum(1 for _ in both)
                counts = (number, longer) if source is _AT_END else (longer, number)
                raise UsageError(
                    f"{self.texts[0].name} has {counts[0]:,} lines, but {self.texts[1].name} has "
                    f"{counts[1]:,}; each line must be the translation of the other file's"
                )
            yield source, target


_AT_END = object()


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
