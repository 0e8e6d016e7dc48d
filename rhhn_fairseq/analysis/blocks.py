"""The blocks of a network's weights: which of its parameters are matrices, and their norms."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rhhn_fairseq.errors import UsageError

# Vectors that are stored as matrices, one row for each gate or depth.
VECTORS = re.compile(r"(?:^|\.)(?:bias|gate_gain|gate_shift)[^.]*$")
# Parameters that hold one matrix for each gate or depth, counted from 0 in their first dimension.
STACKED = re.compile(r"(?:^|\.)(?:weight_z|weight_d|weight_b)$")


@dataclass(frozen=True)
class Block:
    """One matrix of weights.

    Attributes:
        name: as the checkpoint has it, with a number behind it for a matrix of several in one parameter.
        norm: the L2 (Frobenius) norm. count: of its weights.
    """

    name: str
    norm: float
    count: int

    @property
    def root_mean_square(self) -> float:
        """The norm of one weight: the norm over the root of the number of weights."""
        return self.norm / self.count**0.5


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a parameter is one matrix or several, and no vector such as a bias."""
    return tensor.dim() >= 2 and tensor.is_floating_point() and not VECTORS.search(name)


def weight_blocks(weights: Mapping[str, Tensor]) -> list[Block]:
    """The norms of all matrices, in the order of the checkpoint; vectors such as biases are left out.

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
