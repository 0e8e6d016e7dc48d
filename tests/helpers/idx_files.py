"""Small files in MNIST's format."""

import gzip
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    """The array as an IDX file of unsigned bytes."""
    header = bytes((0, 0, 8, array.ndim))
    return (
        header + b"".join(size.to_bytes(4, "big") for size in array.shape) + array.astype(np.uint8).tobytes()
    )


def make_images(count: int, rows: int = 4, columns: int = 3, seed: int = 0):
    """Images whose first pixel is their number, and their labels."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, rows, columns), dtype=np.uint8)
    images[:, 0, 0] = np.arange(count) % 256
    return images, (np.arange(count) % 10).astype(np.uint8)


def write_mnist(directory: Path, train: int = 20, t10k: int = 10, packed: bool = False) -> Path:
    """A directory with all four files; a count of 0 leaves out those of that part."""
    directory.mkdir(parents=True, exist_ok=True)
    for seed, (prefix, count) in enumerate((("train", train), ("t10k", t10k))):
        if not count:
            continue
        images, labels = make_images(count, seed=seed)
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            data = idx_bytes(array)
            path = directory / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(data) if packed else data)
    return directory
