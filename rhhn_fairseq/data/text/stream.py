"""fairseq's memory-mapped dataset format, read and written as one stream of symbols.

PREFIX.bin holds the dictionary indices of all items one after the other. PREFIX.idx holds, after a
26-byte header (magic, version, code of the integer type, number of items), the items' sizes (int32)
and the byte offsets at which they begin (int64). Source: fairseq/data/indexed_dataset.py,
MMapIndexedDataset.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.text.vocabulary import EOS, SPECIAL_SYMBOLS
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless

# An item holds at most this many symbols, so that a text without newlines can be read in pieces.
LONGEST_ITEM = 65_536

_MAGIC = b"MMIDIDX\x00\x00"
# The first bytes of indices that fairseq reads and this module does not: cached or lazy, and huffman.
OTHER_FORMATS = (b"TNTIDX", b"HUFFIDX")
_HEADER = struct.Struct("<9sQBQ")
_COUNT_OFFSET = _HEADER.size - 8
_VERSION = 1
_INTEGER_TYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
    9: np.uint32,
    10: np.uint64,
}
_TYPE_CODES = {np.dtype(kind): code for code, kind in _INTEGER_TYPES.items()}

# Numbers checked or copied at a time: a few megabytes for a corpus of any size.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class StreamIndex:
    """What PREFIX.idx says: integer type, number of items, number of symbols in all of them."""

    dtype: np.dtype
    items: int
    symbols: int


def storage_dtype(vocab_size: int) -> np.dtype:
    """Returns the integer type that fairseq chooses for a dictionary of this size."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.uint32)


def open_stream(prefix: str | Path, vocab_size: int) -> np.memmap:
    """Opens the whole split PREFIX.bin as one read-only array of dictionary indices, [T].

    vocab_size: the size of the dictionary, special symbols included.

    Reads the split once, a block at a time, to check every index. Raises UsageError if a file is
    missing, not of this format or cut off, or if an index lies outside the dictionary.
    """
    path, index = check_stream(prefix, vocab_size, lowest=EOS)
    if not index.symbols:
        raise UsageError(f"{path}: holds no symbols")
    return np.memmap(path, dtype=index.dtype, mode="r")


def check_stream(
    prefix: str | Path, vocab_size: int | None, lowest: int = 0, shortest: int = 0
) -> tuple[Path, StreamIndex]:
    """Returns the path of PREFIX.bin and its index, both checked. Raises UsageError as ``open_stream`` does.

    Args:
        vocab_size: None for numbers that no dictionary lists. lowest: the smallest one that may occur.
        shortest: the smallest size that an item may have.
    """
    index = read_index(prefix, shortest)
    path = _with_suffix(Path(prefix), ".bin")
    expected, actual = index.symbols * index.dtype.itemsize, path.stat().st_size
    if actual != expected:
        raise UsageError(
            f"{path}: expected {expected:,} bytes by its .idx file, found {actual:,}; "
            "prepare the corpus again with --force"
        )
    if vocab_size is not None:
        _check_indices(path, index.dtype, vocab_size, lowest)
    return path, index


def read_index(prefix: str | Path, shortest: int = 0) -> StreamIndex:
    """Reads and checks PREFIX.idx, in bounded memory. Raises UsageError as ``open_stream`` does.

    Args:
        shortest: the smallest size that an item may have.
    """
    path = _with_suffix(Path(prefix), ".idx")
    with _open(path) as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise UsageError(
                f"{path}: is cut off, or not an index of fairseq's format mmap; make it with rhhn prepare or "
                "fairseq-preprocess --dataset-impl mmap"
            )
        _, version, code, items = _HEADER.unpack(header)
        if version != _VERSION or code not in _INTEGER_TYPES:
            raise UsageError(f"{path}: has version {version} and type {code} of integers, which are unknown")
        expected, size = _HEADER.size + items * 12, path.stat().st_size
        if size != expected:
            raise UsageError(
                f"{path}: expected {expected:,} bytes for {items:,} items, found {size:,}; "
                "prepare the corpus again with --force"
            )
        dtype = np.dtype(_INTEGER_TYPES[code])
        return StreamIndex(dtype, items, _check_items(file, path, items, dtype.itemsize, shortest))


def _check_items(file, path: Path, items: int, itemsize: int, shortest: int) -> int:
    """Checks that the items follow one another; returns the number of symbols in all of them."""
    symbols = 0
    for first in range(0, items, _BLOCK):
        count = min(_BLOCK, items - first)
        file.seek(_HEADER.size + 4 * first)
        sizes = np.frombuffer(file.read(4 * count), dtype=np.int32).astype(np.int64)
        file.seek(_HEADER.size + 4 * items + 8 * first)
        offsets = np.frombuffer(file.read(8 * count), dtype=np.int64)
        ends = symbols + np.cumsum(sizes)
        if (sizes < shortest).any() or (offsets != (ends - sizes) * itemsize).any():
            raise UsageError(f"{path}: its items do not follow one another")
        symbols = int(ends[-1])
    return symbols


def _check_indices(path: Path, dtype: np.dtype, vocab_size: int, lowest: int) -> None:
    # Plain reads, because touched pages of a memory map would count as this process's memory.
    position = 0
    with _open(path) as file:
        while block := file.read(_BLOCK * dtype.itemsize):
            indices = np.frombuffer(block, dtype=dtype)
            outside = np.flatnonzero((indices < 0) | (indices >= vocab_size))
            if outside.size:
                raise UsageError(
                    f"{path}: symbol {position + int(outside[0]):,} is "
                    f"{int(indices[outside[0]])}, outside of the dictionary of {vocab_size} "
                    "symbols; dict.txt and the .bin file do not belong together"
                )
            reserved = np.flatnonzero(indices < lowest)
            if reserved.size:
                raise UsageError(
                    f"{path}: symbol {position + int(reserved[0]):,} is "
                    f"{SPECIAL_SYMBOLS[int(indices[reserved[0]])]}, which fairseq reserves; rename it in the "
                    "text and binarise the text again"
                )
            position += indices.size


class StreamWriter:
    """Writes PREFIX.bin and PREFIX.idx block by block, in memory that does not grow.

    The files are byte for byte those of fairseq's MMapIndexedDatasetBuilder, given one item per line
    (its newline included) and several items for a line of more than ``longest_item`` symbols. Use as a
    context manager; the index is complete when the context ends without an exception.
    """

    def __init__(self, prefix: str | Path, vocab_size: int, longest_item: int = LONGEST_ITEM):
        self.items = 0
        self.symbols = 0
        self._prefix = Path(prefix)
        self._dtype = storage_dtype(vocab_size)
        self._longest_item = longest_item
        # Symbols since the last item ended.
        self._open_symbols = 0

    def __enter__(self) -> "StreamWriter":
        self._bin = _with_suffix(self._prefix, ".bin").open("wb")
        self._idx = _with_suffix(self._prefix, ".idx").open("w+b")
        self._idx.write(_HEADER.pack(_MAGIC, _VERSION, _TYPE_CODES[self._dtype], 0))
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        with self._bin, self._idx:
            if error_type is None:
                self._finish()

    def write(self, indices: np.ndarray, ends_line: np.ndarray) -> None:
        """Appends dictionary indices [T]; ``ends_line`` [T] is true at newlines."""
        self._bin.write(indices.astype(self._dtype).tobytes())
        self.symbols += indices.size
        ends = np.flatnonzero(ends_line) + 1
        lines = np.diff(ends, prepend=-self._open_symbols)
        self._write_sizes(cut_lines(lines, self._longest_item))
        rest = indices.size - int(ends[-1]) if ends.size else self._open_symbols + indices.size
        full_items, self._open_symbols = divmod(rest, self._longest_item)
        self._write_sizes(np.full(full_items, self._longest_item, dtype=np.int32))

    def _finish(self) -> None:
        if self._open_symbols:
            self._write_sizes(np.array([self._open_symbols], dtype=np.int32))
        symbols = 0
        for first in range(0, self.items, _BLOCK):
            self._idx.seek(_HEADER.size + 4 * first)
            count = min(_BLOCK, self.items - first)
            sizes = np.frombuffer(self._idx.read(4 * count), dtype=np.int32).astype(np.int64)
            ends = symbols + np.cumsum(sizes)
            self._idx.seek(0, 2)
            self._idx.write(((ends - sizes) * self._dtype.itemsize).tobytes())
            symbols = int(ends[-1])
        self._idx.seek(_COUNT_OFFSET)
        self._idx.write(struct.pack("<Q", self.items))

    def _write_sizes(self, sizes: np.ndarray) -> None:
        self._idx.write(sizes.astype(np.int32).tobytes())
        self.items += sizes.size


def cut_lines(lines: np.ndarray, longest: int = LONGEST_ITEM) -> np.ndarray:
    """Returns the item sizes of lines of these sizes (each at least 1): a long line becomes several items.

    All items of a line but its last have ``longest`` symbols.
    """
    pieces = -(-lines // longest)
    sizes = np.full(int(pieces.sum()), longest, dtype=np.int64)
    sizes[np.cumsum(pieces) - 1] = lines - (pieces - 1) * longest
    return sizes


def _with_suffix(prefix: Path, suffix: str) -> Path:
    # Path.with_suffix would replace what follows a dot in the prefix itself.
    return prefix.with_name(prefix.name + suffix)


def _open(path: Path):
    refuse_endless(path)
    return path.open("rb")
