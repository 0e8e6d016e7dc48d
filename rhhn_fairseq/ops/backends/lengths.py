"""Lengths of the sequences that are recorded as CUDA graphs, each of which fits one length.

The first ``EXACT`` lengths that a cell reads stay as they are. Language models have only a few, so they
lose nothing. All others are padded with masked steps to the next of ``PER_DOUBLING`` lengths between powers
of two, so that the sentences of a translation corpus share some thirty lengths.

Shapes: T time, B batch, C input.
"""

from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXACT = 4
"""Number of lengths that a cell takes as they are, besides single steps."""

PER_DOUBLING = 8
"""Number of lengths from one power of two to the next, so that padding adds less than an eighth."""

_exact: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()


def graph_length(T: int) -> int:
    """Returns the smallest length, T or above, that sequences are padded to."""
    unit = max(1, (1 << (T - 1).bit_length()) // (2 * PER_DOUBLING))
    return T + -T % unit


def keeps_length(cell: nn.Module, T: int) -> bool:
    """Whether a cell takes a length without padding. The answer for a length never changes."""
    exact = _exact.setdefault(cell, {1})
    if len(exact) <= EXACT:
        exact.add(T)
    return T in exact


def pad_to_graph_length(
    x_TBC: Tensor,
    first_TB1: Tensor | None,
    mask_TB: Tensor | None,
    noise: dict[str, Tensor] | None,
) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Tensor] | None]:
    """Pads a pass's input to its ``graph_length``; returns a mask even if nothing is added.

    Args: as for ``Cell.run``. Noise of single steps is padded too.
    """
    T, B, _ = x_TBC.shape
    more = graph_length(T) - T

    def fill(tensor: Tensor) -> Tensor:
        return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, more)) if more else tensor

    if mask_TB is None:
        mask_TB = torch.ones(T, B, dtype=torch.bool, device=x_TBC.device)
    if noise is not None:
        noise = {name: fill(tensor) if len(tensor) == T else tensor for name, tensor in noise.items()}
    return fill(x_TBC), None if first_TB1 is None else fill(first_TB1), fill(mask_TB), noise
