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
    magic = bytes((0, 0, UNSIGNED_BYTES, dimensions))
    if header[:4] != magic or len(header) < header_bytes:
        raise UsageError(
            f"{path}: begins with {header[:4].hex()}, an IDX file of {dimensions} dimensions begins with "
            f"{magic.hex()} and their sizes"
        )
    shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4", offset=4))
    size = math.prod(shape)
    # Reads one byte more than expected, to notice a longer file.
    data = b"".join(source.chunks(header_bytes, header_bytes + size + 1)) if size <= LARGEST else b""
    if not size or len(data) != size:
        raise UsageError(
            f"{path}: its header says {' x '.join(map(str, shape))} bytes, which it does not contain"
        )
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
