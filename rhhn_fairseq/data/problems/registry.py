"""The problems by name, and their options."""

from collections.abc import Callable

import numpy as np

from rhhn_fairseq.data.common.download import default_download_dir
from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.problems.generated import Adding, Copying, Problem, TemporalXor
from rhhn_fairseq.data.problems.images import (
    MNIST_BRIGHTEST,
    STANDARD_SPLIT,
    PixelSequences,
    digits,
    load_mnist,
)
from rhhn_fairseq.errors import UsageError

PERMUTATION = {"permutation_seed": 0}
MNIST = {"mnist_dir": None, "mnist_split": STANDARD_SPLIT}


def _mnist(name, mnist_dir, mnist_split, permutation_seed=None):
    splits = load_mnist(mnist_dir, default_download_dir() / "mnist", mnist_split)
    return PixelSequences(name, splits, MNIST_BRIGHTEST, permutation_seed)


PROBLEMS: dict[str, tuple[Callable[..., Problem], dict]] = {
    "copying": (
        lambda name, length, copying_input: Copying(length, copying_input),
        {"length": 100, "copying_input": "scalar"},
    ),
    "adding": (lambda name, length: Adding(length), {"length": 100}),
    "xor": (lambda name, length: TemporalXor(length), {"length": 30}),
    "digits": (digits, {}),
    "pdigits": (digits, PERMUTATION),
    "mnist": (_mnist, MNIST),
    "pmnist": (_mnist, MNIST | PERMUTATION),
}

OPTIONS = sorted({option for _, options in PROBLEMS.values() for option in options})
"""All options that some problem has."""


def build_problem(name: str, given: dict) -> Problem:
    """Builds a problem.

    Args:
        name: one of ``PROBLEMS``. given: values of ``OPTIONS``, None for those that were not given.

    Raises:
        UsageError: no problem has that name, an option is not one of its own, or a value cannot work.
    """
    if name not in PROBLEMS:
        raise UsageError(f"--problem {name} is unknown, choose from {', '.join(PROBLEMS)}")
    build, options = PROBLEMS[name]
    given = {option: value for option, value in given.items() if value is not None}
    for option, value in given.items():
        if option not in options:
            has = ", ".join(map(_flag, options)) or "none"
            raise UsageError(f"{_flag(option)} {value} is not an option of --problem {name}, it has {has}")
    return build(name, **options | given)


def blank_problem(name: str) -> Problem:
    """Returns the problem of that name with its default options and, if it has images, black ones.

    It determines a model's sizes without reading a file.
    """
    if PROBLEMS[name][0] not in (digits, _mnist):
        return build_problem(name, {})
    black = np.zeros((1, 1, 1), np.uint8), np.zeros(1, np.uint8)
    return PixelSequences(name, dict.fromkeys(SPLITS, black), MNIST_BRIGHTEST)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
