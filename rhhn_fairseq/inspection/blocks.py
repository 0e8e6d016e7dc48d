"""Blocks of a network's weights: the parameters that are matrices, and their norms."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rhhn_fairseq.errors import UsageError

# Vectors that are stored as matrices, one row per gate or depth.
VECTORS = re.compile(r"(?:^|\.)(?:bias|gate_gain|gate_shift)[^.]*$")
# Parameters that hold one matrix per gate or depth, counted from 0 in their first dimension.
STACKED = re.compile(r"(?:^|\.)(?:weight_z|weight_d|weight_b|weight_rank)$")


@dataclass(frozen=True)
class Block:
    """One matrix of weights.

    Attributes:
        name: as in the checkpoint, followed by a number if the parameter holds several matrices.
        norm: the L2 (Frobenius) norm. count: number of its weights.
    """

    name: str
    norm: float
    count: int

    @property
    def root_mean_square(self) -> float:
        """Returns the norm divided by the square root of the number of weights."""
        return self.norm / self.count**0.5


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Returns whether a parameter is one matrix or several, not a vector such as a bias."""
    return tensor.dim() >= 2 and tensor.is_floating_point() and not VECTORS.search(name)


def weight_blocks(weights: Mapping[str, Tensor]) -> list[Block]:
    """Returns all matrices with their norms, in the order of the checkpoint, without vectors such as biases.

    Args:
        weights: a ``state_dict``.

    Raises:
        UsageError: there is no matrix.
    """
    blocks = []
    for name, tensor in weights.items():
        if not is_matrix(name, tensor):
            continue
        if tensor.dim() == 3 and STACKED.search(name):
            matrices = {f"{name}.{number}": matrix for number, matrix in enumerate(tensor)}
        else:
            matrices = {name: tensor}
        for label, matrix in matrices.items():
            blocks.append(Block(label, matrix.double().norm().item(), matrix.numel()))
    if not blocks:
        raise UsageError("the checkpoint has no matrix of weights")
    return blocks


def norm_arrays(runs: Mapping[str, Sequence[Block]]) -> dict[str, np.ndarray]:
    """Returns for each run the names, norms and numbers of weights of its blocks."""
    arrays = {}
    for run, blocks in runs.items():
        arrays[f"{run}.blocks"] = np.array([block.name for block in blocks])
        arrays[f"{run}.norms"] = np.array([block.norm for block in blocks])
        arrays[f"{run}.counts"] = np.array([block.count for block in blocks])
    return arrays


def block_label(name: str) -> str:
    """Returns a block's name with its layer in words.

    Below a handwriting model's window there is one layer, ``first``, and above it are the others, ``upper``.
    """
    name = re.sub(r"(?:^|(?<=\.))(?:stack\.)?first\.cell\.", "layer 1: ", name)
    return re.sub(
        r"(?:^|(?<=\.))(?:stack\.)?(upper\.)?(backward_)?cells\.(\d+)\.",
        lambda match: f"layer {int(match[3]) + (2 if match[1] else 1)}{', backward' if match[2] else ''}: ",
        name,
    )
