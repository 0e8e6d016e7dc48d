"""One step of a cell whose input includes something computed from the previous step.

Shapes: T time, B batch, F columns that are fed back.
"""

import torch
from torch import Tensor

from rhhn_fairseq.cells.contract import InputMap, apply_maps
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.backends import Plan
from rhhn_fairseq.ops.loop import Noise, State


class FedBackCell:
    """Steps of a cell, some of whose input columns are fed back.

    The maps of these columns are sliced once, because every slicing costs a zero-filled gradient of the
    whole weight.

    Args:
        cell: the cell. columns: number of the other columns, which come first.
        plan: how a pass of one step runs, see ``Cell.plan_of_steps``.
    """

    def __init__(self, cell: Cell, columns: int, plan: Plan):
        self.cell, self.plan = cell, plan
        self.maps: tuple[InputMap, ...] = cell.maps_of(slice(columns, None))

    def step(
        self, g_t: tuple[Tensor, ...], fed_BF: Tensor, state: State, noise_t: Noise | None
    ) -> tuple[Tensor, State]:
        """Computes one time step: ``Cell.prepare`` for a pass of one step, then ``Cell.step``.

        Args:
            g_t: the projection of the other columns at this step, tensors [B, ...].
            fed_BF: what is fed back.

        Returns:
            the output [B, H] and the next state.
        """
        shares = apply_maps(fed_BF, self.maps)
        # What ``begin`` appended to the projections is not affine in the input.
        g_t = (*map(torch.add, g_t, shares), *g_t[len(shares) :])
        g_1 = tuple(tensor.unsqueeze(0) for tensor in g_t)
        noise_1 = None if noise_t is None else {name: draw.unsqueeze(0) for name, draw in noise_t.items()}
        g_1, ready = self.cell.prepare(g_1, state, None, noise_1, self.plan)
        return self.cell.step(tuple(tensor[0] for tensor in g_1), ready, noise_t)
