"""MNIST: finds its four files, and deals its images to training, validation and test."""

import gzip
import hashlib
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.download import download
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.common.sources import check_directory
from rhhn_fairseq.data.problems.idx import read_labelled_images
from rhhn_fairseq.errors import UsageError

# The copy that torchvision downloads; the original address refuses programs.
URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"

# MD5 of the unpacked files.
PUBLISHED = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
CLASSES = 10
STANDARD_SPLIT = "50000/10000/10000"
T10K_SPLIT = "t10k:8000/1000/1000"

# Seed of the order in which the images of the t10k file are dealt.
T10K_ORDER_SEED = 10_000


@dataclass(frozen=True)
class MnistSplit:
    """How many images each split has, and from which file.

    Attributes:
        text: as it was given. sizes: images of train, valid and test.
        only_t10k: all come from the file of 10,000 test images, in one fixed random order, because its
            first half is easier than its second (http://yann.lecun.com/exdb/mnist/). Otherwise train is the
            beginning of the training file, valid its end, and test the beginning of the test file.
    """

    text: str
    sizes: tuple[int, int, int]
    only_t10k: bool

    @classmethod
    def parse(cls, text: str) -> "MnistSplit":
        """Reads ``TRAIN/VALID/TEST`` or ``t10k:TRAIN/VALID/TEST``; UsageError for anything else."""
        # Python converts at most 4,300 digits.
        match = re.fullmatch(r"(t10k:)?([1-9]\d{0,17})/([1-9]\d{0,17})/([1-9]\d{0,17})", text)
        if not match:
            raise UsageError(
                f"--mnist-split {text} is not TRAIN/VALID/TEST, such as {STANDARD_SPLIT} or {T10K_SPLIT}"
            )
        return cls(text, tuple(int(match[n]) for n in (2, 3, 4)), match[1] is not None)


def load_mnist(directory: str | Path | None, download_dir: Path, split: MnistSplit):
    """Loads the images of each split.

    Args:
        directory: holds the files, plain or .gz; None to download them.
        download_dir: where downloads are kept.
        split: how many images each split has.

    Returns:
        for train, valid and test, pixels uint8 [N, rows, columns] and classes uint8 [N].

    Raises:
        UsageError: a file is missing, damaged or has too few images, or cannot be downloaded.
    """
    if directory is not None:
        check_directory(directory, "--mnist-dir")
    if split.only_t10k:
        images, labels = _read("t10k", directory, download_dir)
        order = np.random.default_rng(T10K_ORDER_SEED).permutation(len(images))
        _require(sum(split.sizes), images, split)
        bounds = np.cumsum(split.sizes)
        indices = np.split(order[: bounds[-1]], bounds[:-1])
        return {name: (images[rows], labels[rows]) for name, rows in zip(SPLITS, indices, strict=True)}
    train, valid, test = split.sizes
    images, labels = _read("train", directory, download_dir)
    _require(train + valid, images, split)
    tests, test_labels = _read("t10k", directory, download_dir)
    _require(test, tests, split)
    if images.shape[1:] != tests.shape[1:]:
        raise UsageError(
            f"the training images are {_by(images)} and the test images {_by(tests)}; they do not belong "
            "together"
        )
    return {
        "train": (images[:train], labels[:train]),
        "valid": (images[-valid:], labels[-valid:]),
        "test": (tests[:test], test_labels[:test]),
    }


def _read(prefix: str, directory, download_dir):
    """Reads images and labels of the ``train`` or the ``t10k`` files."""
    names = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
    if directory is None:
        paths = [_downloaded(name, Path(download_dir)) for name in names]
    else:
        paths = [_existing_path(name, Path(directory)) for name in names]
    images, labels = read_labelled_images(*paths)
    if labels.max() >= CLASSES:
        raise UsageError(
            f"{paths[1]}: has the label {labels.max()}, images of digits have labels of 0 to {CLASSES - 1}"
        )
    return images, labels


def _existing_path(name: str, directory: Path) -> Path:
    # Some copies have a dot in place of the second hyphen.
    for variant in (name, name.replace("-idx", ".idx")):
        for suffix in ("", ".gz"):
            path = directory / (variant + suffix)
            # For a path without access rights os.path returns False, where Path raises.
            if os.path.isfile(path):
                return path
    raise UsageError(
        f"--mnist-dir {directory}: has no {name}, plain or as .gz"
        + ("" if name.startswith("t10k") else f"; --mnist-split {T10K_SPLIT} needs the t10k files only")
    )


def _downloaded(name: str, directory: Path) -> Path:
    def find_fault(path: Path) -> str | None:
        digest = hashlib.md5(usedforsecurity=False)
        try:
            with gzip.open(path) as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except (OSError, EOFError, zlib.error) as error:
            return f"is damaged ({error})"
        if digest.hexdigest() != PUBLISHED[name]:
            return f"is not the published file (its MD5 is {digest.hexdigest()}, not {PUBLISHED[name]})"
        return None

    return download(f"{URL}{name}.gz", directory, option="--mnist-dir", find_fault=find_fault)


def _require(needed: int, images: np.ndarray, split: MnistSplit) -> None:
    if len(images) < needed:
        raise UsageError(
            f"--mnist-split {split.text} takes {needed:,} images of a file that holds {len(images):,}"
        )


def _by(images: np.ndarray) -> str:
    return " x ".join(map(str, images.shape[1:]))
