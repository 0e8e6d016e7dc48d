"""IDX, the file format of MNIST: a header, and an array of bytes.

A header is two zero bytes, the type of the elements (8: unsigned bytes), the number of dimensions, and each
dimension as four bytes, the most significant first (http://yann.lecun.com/exdb/mnist/).
"""

import math
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.sources import FileSource
from rhhn_fairseq.errors import UsageError

UNSIGNED_BYTES = 0x08
IMAGES, LABELS = 3, 1
"""How many dimensions files of images (number, rows, columns) and of labels have."""

# Files are read into memory; MNIST's largest has 47 million bytes.
LARGEST = 1 << 31


def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """Reads the array of an IDX file of unsigned bytes, plain, .gz or .zip.

    Args:
        path: the file. dimensions: how many it must have, ``IMAGES`` or ``LABELS``.

    Returns:
        uint8, read-only, with that many dimensions.

    Raises:
        UsageError: the file cannot be read, is damaged or of another kind, holds nothing, or is shorter or
            longer than its header says.
    """
    source = FileSource(Path(path))
    header_bytes = 4 + 4 * dimensions
    header = b"".join(source.chunks(0, header_bytes))
    if not header:
        raise UsageError(f"{path}: is empty, an IDX file is expected")
    magic = bytes((0, 0, UNSIGNED_BYTES, dimensions))
    if header[:4] != magic:
        raise UsageError(
            f"{path}: begins with {header[:4].hex()}, an IDX file of {_kind(dimensions)} begins with "
            f"{magic.hex()}"
        )
    if len(header) < header_bytes:
        raise UsageError(f"{path}: is cut off within its header, after {len(header)} bytes")
    shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4", offset=4))
    if 0 in shape:
        raise UsageError(f"{path}: holds no {_kind(dimensions)}, its header says {_times(shape)}")
    size = math.prod(shape)
    if size > LARGEST:
        raise UsageError(
            f"{path}: its header says {_times(shape)} bytes, which does not fit a file of this kind"
        )
    # Reads one byte more than expected, to notice a longer file.
    data = b"".join(source.chunks(header_bytes, header_bytes + size + 1))
    if len(data) != size:
        held = f"only {len(data):,}" if len(data) < size else "more"
        raise UsageError(f"{path}: its header says {_times(shape)} = {size:,} bytes, but it contains {held}")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def read_labelled_images(images: str | Path, labels: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads images, uint8 [N, rows, columns], and their classes, uint8 [N].

    Raises:
        UsageError: as ``read_idx``, or the numbers of images and labels differ.
    """
    pixels, classes = read_idx(images, IMAGES), read_idx(labels, LABELS)
    if len(pixels) != len(classes):
        raise UsageError(
            f"{images} holds {len(pixels):,} images and {labels} {len(classes):,} labels; they do not belong "
            "together"
        )
    return pixels, classes


def _kind(dimensions: int) -> str:
    return {IMAGES: "images", LABELS: "labels"}.get(dimensions, f"{dimensions} dimensions")


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape)
