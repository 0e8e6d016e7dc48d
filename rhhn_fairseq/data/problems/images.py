"""Images read pixel by pixel: the network classifies the image after the last pixel.

MNIST's files are in the format IDX: a header, and an array of bytes. A header is two zero bytes, the type of
the elements (8: unsigned bytes), the number of dimensions, and each dimension as four bytes, the most
significant first (http://yann.lecun.com/exdb/mnist/).

Shapes: N images, T pixels.
"""

import math
import os
import re
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.download import download
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.common.sources import FileSource, check_directory
from rhhn_fairseq.data.problems.generated import Codes, Problem
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for

CLASSES = 10

# Eight tenths, one tenth and one tenth of the 1,797 images of digits, dealt in one fixed random order.
DIGITS_SIZES = (1437, 180, 180)
DIGITS_ORDER_SEED = 1797
DIGITS_BRIGHTEST = 16
MNIST_BRIGHTEST = 255

# The copy that torchvision downloads; the original address refuses programs.
URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"

# MD5 of the unpacked files.
PUBLISHED = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
STANDARD_SPLIT = "50000/10000/10000"
T10K_SPLIT = "t10k:8000/1000/1000"

# Seed of the order in which the images of the t10k file are dealt.
T10K_ORDER_SEED = 10_000

# Files are read into memory; MNIST's largest has 47 million bytes.
LARGEST = 1 << 28


class PixelSequences(Problem):
    """Images as sequences of grey values in [0, 1], row by row, with one of ten classes each.

    Args:
        name: what it is called. splits: for each split pixels uint8 [N, rows, columns] and classes uint8 [N].
        brightest: the pixel value that becomes 1.
        permutation_seed: seed of the order in which pixels are read, the same for all images; None for row
            by row.

    Raises:
        UsageError: the seed is below 0.
    """

    classes = CLASSES
    per_step = False
    input_size = 1

    def __init__(self, name: str, splits, brightest: int, permutation_seed: int | None = None):
        self.name, self.brightest = name, brightest
        self.splits = {
            key: (images.reshape(len(images), -1), labels) for key, (images, labels) in splits.items()
        }
        self.steps = self.splits["train"][0].shape[1]
        self.order = np.arange(self.steps)
        if permutation_seed is not None:
            if permutation_seed < 0:
                raise UsageError(f"--permutation-seed {permutation_seed} is too small, the smallest is 0")
            self.order = np.random.default_rng(permutation_seed).permutation(self.steps)

    def render(self, codes: Codes) -> tuple[np.ndarray, np.ndarray]:
        """See ``Problem.render``; targets [N]."""
        pixels, labels = codes
        inputs = pixels[:, self.order].astype(np.float32) / self.brightest
        return inputs[..., None], labels.astype(np.int64)


def digits(name: str, permutation_seed: int | None = None) -> PixelSequences:
    """Returns the 8 x 8 digits that come with scikit-learn; needs no file and no network.

    UCI's test set of handwritten digits, 1,797 images (Alpaydin and Kaynak 1998), 64 pixels of 0 to 16.

    Raises:
        UsageError: scikit-learn is not installed.
    """
    with needed_for(f"--problem {name} needs"):
        # The import takes a second, so only users of the digits wait for it.
        from sklearn.datasets import load_digits
    digits = load_digits()
    images, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
    order = np.random.default_rng(DIGITS_ORDER_SEED).permutation(len(images))
    indices = np.split(order, np.cumsum(DIGITS_SIZES)[:-1])
    splits = {split: (images[rows], labels[rows]) for split, rows in zip(SPLITS, indices, strict=True)}
    return PixelSequences(name, splits, DIGITS_BRIGHTEST, permutation_seed)


def load_mnist(directory: str | Path | None, download_dir: Path, split: str):
    """Loads MNIST's images of each split (Le et al. 2015, arXiv 1504.00941, who also permuted the pixels).

    Args:
        directory: holds the files, plain or .gz; None to download them.
        download_dir: where downloads are kept.
        split: how many images each split has: ``TRAIN/VALID/TEST`` of the standard files, where train is the
            beginning of the training file, valid its end, and test the beginning of the test file; or
            ``t10k:TRAIN/VALID/TEST`` of the 10,000 test images, in one fixed random order, because their
            first half is easier than their second.

    Returns:
        for train, valid and test, pixels uint8 [N, rows, columns] and classes uint8 [N].

    Raises:
        UsageError: a file is missing, damaged or has too few images, or cannot be downloaded.
    """
    # Python converts at most 4,300 digits.
    match = re.fullmatch(r"(t10k:)?([1-9]\d{0,17})/([1-9]\d{0,17})/([1-9]\d{0,17})", split)
    if not match:
        raise UsageError(
            f"--mnist-split {split} is not TRAIN/VALID/TEST, such as {STANDARD_SPLIT} or {T10K_SPLIT}"
        )
    train, valid, test = map(int, match.groups()[1:])
    if directory is not None:
        check_directory(directory, "--mnist-dir")

    def read(prefix: str, needed: int) -> tuple[np.ndarray, np.ndarray]:
        images, labels = (
            _read_idx(_find(f"{prefix}-{kind}-ubyte", directory, Path(download_dir)), dimensions)
            for kind, dimensions in (("images-idx3", 3), ("labels-idx1", 1))
        )
        if len(images) != len(labels) or labels.max() >= CLASSES:
            raise UsageError(
                f"the {prefix} files of MNIST: labels do not belong to the images, or are no digits"
            )
        if len(images) < needed:
            raise UsageError(
                f"--mnist-split {split} takes {needed:,} images of a file that holds {len(images):,}"
            )
        return images, labels

    if match[1]:
        images, labels = read("t10k", train + valid + test)
        order = np.random.default_rng(T10K_ORDER_SEED).permutation(len(images))[: train + valid + test]
        indices = np.split(order, [train, train + valid])
        return {name: (images[rows], labels[rows]) for name, rows in zip(SPLITS, indices, strict=True)}
    (images, labels), (tests, test_labels) = read("train", train + valid), read("t10k", test)
    if images.shape[1:] != tests.shape[1:]:
        raise UsageError(
            f"the sizes of training images {images.shape[1:]} and test images {tests.shape[1:]} differ"
        )
    return {
        "train": (images[:train], labels[:train]),
        "valid": (images[-valid:], labels[-valid:]),
        "test": (tests[:test], test_labels[:test]),
    }


def _find(name: str, directory: str | Path | None, download_dir: Path) -> Path:
    """Returns the path of one of MNIST's files, which is downloaded unless there is a directory."""
    if directory is None:
        return download(f"{URL}{name}.gz", download_dir, "--mnist-dir", PUBLISHED[name])
    # Some copies have a dot in place of the second hyphen.
    for variant in (name, f"{name}.gz", name.replace("-idx", ".idx"), f"{name.replace('-idx', '.idx')}.gz"):
        path = Path(directory) / variant
        # For a path without access rights os.path returns False, where Path raises.
        if os.path.isfile(path):
            return path
    raise UsageError(
        f"--mnist-dir {directory}: has no {name}, plain or as .gz"
        + ("" if name.startswith("t10k") else f"; --mnist-split {T10K_SPLIT} needs the t10k files only")
    )


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Reads the array of an IDX file of unsigned bytes, plain or .gz."""
    content = b"".join(FileSource(path).chunks(0, LARGEST))
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[first : first + 4], "big") for first in range(4, start, 4))
    magic = bytes((0, 0, 8, dimensions))
    if content[:4] != magic or not math.prod(shape) or len(content) != start + math.prod(shape):
        raise UsageError(f"{path}: is cut off, or no IDX file of {dimensions} dimensions of bytes")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
