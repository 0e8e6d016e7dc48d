"""Images read pixel by pixel: the network classifies the image after the last pixel.

Shapes: N images, T pixels.
"""

from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.problems.base import Codes, StoredProblem
from rhhn_fairseq.data.problems.mnist import CLASSES, MnistSplit, load_mnist
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for

# Eight tenths, one tenth and one tenth of the 1,797 images of digits, dealt in one fixed random order.
DIGITS_SIZES = (1437, 180, 180)
DIGITS_ORDER_SEED = 1797
DIGITS_BRIGHTEST = 16
MNIST_BRIGHTEST = 255


class PixelSequences(StoredProblem):
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


def mnist(
    name: str,
    directory: str | Path | None,
    download_dir: Path,
    split: str,
    permutation_seed: int | None = None,
) -> PixelSequences:
    """Returns MNIST, 784 pixels (Le et al. 2015, arXiv 1504.00941, who also permuted them).

    Args: see ``load_mnist`` and ``MnistSplit.parse``.

    Raises:
        UsageError: a file is missing, damaged or too short, or the split is invalid.
    """
    splits = load_mnist(directory, download_dir, MnistSplit.parse(split))
    return PixelSequences(name, splits, MNIST_BRIGHTEST, permutation_seed)
