"""Finds repeated keys in a file of any size with memory that does not grow with it."""

from pathlib import Path

import numpy as np

KEY = np.dtype(">u8")
"""Eight bytes of a hash. Two of 36 million different pairs share a key with a probability of 1 in 28,000."""

KEYS_IN_MEMORY = 1 << 21
"""Keys that are compared at a time, on average; each takes about 24 bytes then."""

_BLOCK = 1 << 20


def mark_duplicates(keys: Path, marks: Path) -> int:
    """Writes a byte for each key: 1 if the same key came before, else 0; returns the number of ones.

    The keys are divided into ranges, and each pass over the file compares the keys of one range.
    """
    count = keys.stat().st_size // KEY.itemsize
    ranges = 1 + count // KEYS_IN_MEMORY
    # Written, not only reserved: writing to a mapped file on a full disk would kill the process.
    with marks.open("wb") as file:
        for first in range(0, count, _BLOCK):
            file.write(bytes(min(_BLOCK, count - first)))
    if not count:
        return 0
    total = 0
    marked = np.memmap(marks, dtype=np.uint8, mode="r+")
    for index in range(ranges):
        values, positions = _keys_in_range(keys, index, ranges)
        order = np.argsort(values, kind="stable")
        values, positions = values[order], positions[order]
        repeated = positions[1:][values[1:] == values[:-1]]
        marked[repeated] = 1
        total += repeated.size
    marked.flush()
    return total


def _keys_in_range(keys: Path, index: int, ranges: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys in one range, [K] uint64, and their positions in the file, [K] int64."""
    values, positions = [], []
    start = 0
    with keys.open("rb") as file:
        while block := file.read(_BLOCK * KEY.itemsize):
            read = np.frombuffer(block, dtype=KEY).astype(np.uint64)
            # The upper half of a key times the number of ranges, shifted by 32 bits, is the range of the key.
            inside = np.flatnonzero((read >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32) == index)
            values.append(read[inside])
            positions.append(start + inside)
            start += read.size
    return np.concatenate(values), np.concatenate(positions)
