"""Reading two texts line by line: where lines end, long lines, unequal numbers of lines."""

import gzip

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rhhn_fairseq import files
from rhhn_fairseq.data.common.sources import user_file
from rhhn_fairseq.data.parallel.corpora import TextPairs
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lines


@given(st.lists(st.binary(max_size=12)))
@example([b"a\nb", b"\r", b"\n"])
@example([b"one\xe2\x80\xa8still one\x0c\x85\n\n"])
@example([b"\xef", b"\xbb\xbfa"])
@example([b"\xef\xbb\xbf"])
@example([b"\r\r\n"])
def test_lines_end_at_newlines_alone_however_the_chunks_are_cut(chunks):
    text = b"".join(chunks)
    expected = text.split(b"\n")
    if not expected[-1]:
        expected.pop()
    expected = [line[:-1] if line.endswith(b"\r") else line for line in expected]
    if expected and expected[0].startswith(b"\xef\xbb\xbf"):
        expected[0] = expected[0][3:]
    assert list(lines(chunks)) == expected


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_long_line_is_none_and_its_neighbours_are_whole(monkeypatch, size):
    monkeypatch.setattr(files, "LONGEST_LINE", 10)
    text = b"before\n" + b"x" * 11 + b"\nten bytes!\n" + b"y" * 500 + b"\nafter\n" + b"z" * 30
    chunks = [text[first : first + size] for first in range(0, len(text), size)]
    assert list(lines(chunks)) == [b"before", None, b"ten bytes!", None, b"after", None]


def test_memory_of_a_line_without_end_stays_bounded(monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    longest = 0

    class Chunk(bytes):
        def __radd__(self, rest):
            nonlocal longest
            longest = max(longest, len(rest))
            return bytes(rest) + bytes(self)

    assert list(lines(Chunk(b"x" * 100) for _ in range(10_000))) == [None]
    assert 0 < longest <= 1000


def pair(tmp_path, source: bytes, target: bytes) -> TextPairs:
    (tmp_path / "t.en").write_bytes(source)
    (tmp_path / "t.fr.gz").write_bytes(gzip.compress(target))
    return TextPairs("t", (user_file(tmp_path / "t.en"), user_file(tmp_path / "t.fr.gz")))


def test_pairs_keep_their_order_and_empty_lines(tmp_path):
    pairs = pair(tmp_path, b"a\n\nb", b"1\n2\n\n")
    assert list(pairs.read()) == [(b"a", b"1"), (b"", b"2"), (b"b", b"")]


@pytest.mark.parametrize(("source", "target"), [(3, 1), (1, 3), (0, 2), (2, 0), (2500, 2499)])
def test_unequal_numbers_of_lines_are_named(tmp_path, source, target):
    pairs = pair(tmp_path, b"a\n" * source, b"b\n" * target)
    message = rf"t\.en has {source:,} lines, but .*t\.fr\.gz has {target:,}"
    with pytest.raises(UsageError, match=message):
        list(pairs.read())
