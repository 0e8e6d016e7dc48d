"""The loop over ``Cell.step``: right for every cell, device and dtype, and the oracle of the others."""

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Cell, Noise, State


def scan(
    cell: Cell, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None
) -> tuple[Tensor, State]:
    """Runs ``cell.step`` at every position; see ``Cell.forward`` for arguments and masks.

    Without autocast, which casts what a step needs, a state of a wider type is rounded to that of ``g``
    before the first step; the last one has the type of the first again.
    """
    first, dtype = state, g[0].dtype
    if any(part.dtype != dtype for part in state) and not torch.is_autocast_enabled(g[0].device.type):
        state = tuple(part.to(dtype) for part in state)
    outputs = []
    # Unbinding once has one backward node that stacks; indexing at every step would have each step's
    # backward fill a tensor as large as the sequence.
    for t, g_t in enumerate(zip(*(part.unbind(0) for part in g), strict=True)):
        y_BH, new = cell.step(g_t, state, slice_noise(noise, t))
        if mask_TB is not None:
            here_B1 = mask_TB[t].unsqueeze(-1)
            y_BH = y_BH.masked_fill(~here_B1, 0.0)
            new = keep_state(here_B1, new, state)
        outputs.append(y_BH)
        state = new
    return torch.stack(outputs), tuple(new.to(old.dtype) for new, old in zip(state, first, strict=True))


def slice_noise(noise: Noise | None, t: int) -> Noise | None:
    """The noise of step ``t``: entries with a leading 1 hold for every step."""
    if noise is None:
        return None
    return {name: part[t if part.shape[0] > 1 else 0] for name, part in noise.items()}


def keep_state(here_B1: Tensor, new: State, old: State) -> State:
    """The new state at real positions, the old one at padding."""
    return tuple(
        after if after is before else torch.where(here_B1, after, before)
        for after, before in zip(new, old, strict=True)
    )
