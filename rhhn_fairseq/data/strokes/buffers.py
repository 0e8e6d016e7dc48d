"""Builds arrays of plain numbers and texts over bytes, with every length checked."""

import math

import numpy as np

MOST_DIMENSIONS = 3
LONGEST_TEXT = 1 << 20
NUMBERS = {
    *(("b", size) for size in "1"),
    *((kind, size) for kind in "iu" for size in "1248"),
    *(("f", size) for size in "248"),
}
"""Kind and size in bytes of the numbers that are read."""


def plain_dtype(order: str, kind: str, size: str) -> np.dtype:
    """Returns the dtype of numbers or texts; ValueError for any other.

    Args:
        order: of the bytes, "<", ">", "|", "=" or "". kind: as in ``numpy.dtype.kind``. size: the digits
            after it.
    """
    if kind in "SU":
        if not 0 < int(size or 0) <= LONGEST_TEXT:
            raise ValueError(f"texts of type {kind}{size}")
    elif (kind, size) not in NUMBERS:
        raise ValueError(f"elements of type {kind}{size}, which are not plain numbers")
    return np.dtype(f"{order or '='}{kind}{size}")


def array_over(data: bytes, dtype: np.dtype, shape: tuple[int, ...], fortran: bool = False) -> np.ndarray:
    """Returns a read-only array of numbers or texts over bytes; ValueError unless they fit exactly."""
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions, which no line of handwriting has")
    # NumPy multiplies modulo 2**64.
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"an array of {dtype} and shape {shape} has {expected:,} bytes, not {len(data):,}")
    if dtype.kind == "U":
        # Fails here for invalid code points; NumPy would fail too late to say where they are.
        data.decode("utf-32-be" if dtype.str.startswith(">") else "utf-32-le")
    flat = np.frombuffer(data, dtype=dtype) if data else np.zeros(0, dtype=dtype)
    return flat.reshape(shape, order="F" if fortran else "C")
