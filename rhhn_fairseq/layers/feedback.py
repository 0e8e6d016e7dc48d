"""The loop of a cell whose input includes something computed from the previous step.

Shapes: T time, B batch, C columns of the input, F columns that are fed back.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rhhn_fairseq.cells.contract import apply_maps
from rhhn_fairseq.cells.running import Cell, first_positions
from rhhn_fairseq.ops.loop import Noise, State, scan

Advance = Callable[[Tensor, State, Noise | None], tuple[Tensor, State]]
"""Maps what is fed back [B, F], the cell's state and the step's noise to its output and next state."""

Step = Callable[[Advance, State, Noise | None], tuple[tuple[Tensor, ...], State]]
"""Maps a function that runs the cell at this step, the state and the noise to outputs and next state."""


def run_with_feedback(
    cell: Cell,
    step: Step,
    x_TBC: Tensor,
    state: State | None,
    zero_state: Callable[..., State],
    mask_TB: Tensor | None,
    noise: Noise | None,
) -> tuple[tuple[Tensor, ...], State]:
    """Runs a cell that reads ``[x; what is fed back]``; the last four arguments are as in ``Cell.forward``.

    The input's columns are projected outside the loop. Those that are fed back are projected inside, where
    ``Cell.prepare`` runs as well, for a pass of one step.

    Args:
        step: computes what is fed back, and calls the function that it is given with it.
        zero_state: makes the state of a sequence that starts without one, as ``Cell.zero_state``.

    Returns:
        the outputs of ``step``, [T, B, ...], and the state after the last step.
    """
    T, B, C = x_TBC.shape
    if mask_TB is not None:
        x_TBC = x_TBC.masked_fill(~mask_TB.unsqueeze(-1), 0.0)
    if noise is None and cell.training:
        noise = cell.sample_noise(T, B, x_TBC.device)
    g = apply_maps(x_TBC, cell.maps_of(slice(0, C)))
    if state is None:
        state = zero_state(B, x_TBC.device, x_TBC.dtype)
        if cell.begins:
            g = cell.begin(g, first_positions(T, B, mask_TB, x_TBC.device))
    # Sliced once, because every slicing costs a zero-filled gradient of the whole weight.
    maps, plan, cell_step = cell.maps_of(slice(C, None)), cell.plan_of_steps(x_TBC), cell.step_of_a_pass()

    def one_step(g_t, state, noise_t):
        def advance(fed_BF, state, noise_t):
            shares = apply_maps(fed_BF, maps)
            # What ``begin`` appended to the projections is not affine in the input.
            summed = (*map(torch.add, g_t, shares), *g_t[len(shares) :])
            g_1 = tuple(tensor.unsqueeze(0) for tensor in summed)
            noise_1 = None if noise_t is None else {name: draw.unsqueeze(0) for name, draw in noise_t.items()}
            g_1, ready = cell.prepare(g_1, state, None, noise_1, plan)
            return cell_step(tuple(tensor[0] for tensor in g_1), ready, noise_t)

        return step(advance, state, noise_t)

    return scan(one_step, g, state, mask_TB, noise)
