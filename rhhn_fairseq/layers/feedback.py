"""One step of a cell that reads, beside its input, something made of the step before.

Shapes: T time, B batch, F what is fed back.
"""

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Cell, InputMap, Noise, State, apply_maps
from rhhn_fairseq.kernels.reference import slice_noise


def fed_back_step(
    cell: Cell,
    g_t: tuple[Tensor, ...],
    fed_BF: Tensor,
    maps: tuple[InputMap, ...],
    state: State,
    mask_TB: Tensor | None,
    noise: Noise | None,
    t: int,
) -> tuple[Tensor, State]:
    """``cell.step`` at step t, after what the cell does in a pass of its own, as a pass of one step.

    Args:
        g_t: the projection of the input's other columns at this step, tensors [B, ·].
        fed_BF: what is fed back. maps: the cell's maps of its columns, taken once before the loop.
        state: the cell's. mask_TB, noise: of the whole sequence.

    Returns:
        the output [B, H] and the next state, also at padding, where the caller keeps the old one.
    """
    shares = apply_maps(fed_BF, maps)
    # What ``begin`` added behind the projections is not affine in the input.
    g_t = (*map(torch.add, g_t, shares), *g_t[len(shares) :])
    g_1, ready = cell.prepare(
        tuple(part.unsqueeze(0) for part in g_t),
        state,
        None if mask_TB is None else mask_TB[t : t + 1],
        _one_step(noise, t),
    )
    return cell.step(tuple(part[0] for part in g_1), ready, slice_noise(noise, t))


def _one_step(noise: Noise | None, t: int) -> Noise | None:
    """The noise of step ``t`` as that of a pass of one step."""
    if noise is None:
        return None
    return {name: part[t : t + 1] if part.shape[0] > 1 else part for name, part in noise.items()}
