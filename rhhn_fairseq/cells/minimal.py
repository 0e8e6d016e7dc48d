"""minGRU and minLSTM (Feng et al. 2024, arXiv 2410.01201, appendix B): gates that never read the state.

minGRU::    k = x W_z + b_z
minLSTM::   k = log sigmoid(x W_i + b_i) - log sigmoid(x W_f + b_f)

and for both::

    u  = g(x W_h + b_h),   g(v) = v + 0.5 for v >= 0, sigmoid(v) below
    h' = sigmoid(-k) * h + sigmoid(k) * u

The minLSTM's k makes sigmoid(k) = i / (i + f), so that its gates add up to one. The recurrence is linear
in h, so ``ops.linear_scan`` computes all steps at once.

This is the cell alone; the paper's language models put it into blocks with a convolution, an MLP and
normalisation. Departures from the paper: the state starts at zero, not at g(0). The scan multiplies factors
below one instead of summing logarithms: in float32 with 64 steps of random gates, the gradient of a scan in
log space was off by 1.1e-4 of its largest entry, that of the loop by 1.1e-7. h enters no matrix, so these
cells have no options for recurrent dropout and h-detach.
"""

import functools

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from rhhn_fairseq.cells.config import StateConfig
from rhhn_fairseq.cells.contract import glorot_
from rhhn_fairseq.cells.numpy_math import at, over_time, sigmoid, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.linear_scan import linear_scan
from rhhn_fairseq.ops.loop import noise_at


def _naive(p, config, x, state, noise, gates):
    """Computes a step of both cells in numpy; ``gates`` returns the factors of h and of u."""
    (h,) = state
    H = config.hidden_size
    a = x @ p["weight_x"] + p["bias"]
    keep, take = gates(*np.split(sigmoid(a[:-H]), len(a) // H - 1))
    u = np.where(a[-H:] >= 0, a[-H:] + 0.5, sigmoid(a[-H:]))
    h = zone(h, keep * h + take * u, config.zoneout, at(noise, "zoneout"))
    return h, (h,)


naive_min_gru = over_time(functools.partial(_naive, gates=lambda z: (1.0 - z, z)))
naive_min_lstm = over_time(functools.partial(_naive, gates=lambda f, i: (f / (f + i), i / (f + i))))


class MinimalCell(Cell):
    """Base of both cells; see the module's docstring. State: (h [B, H],)."""

    affine_weights = ("weight_x",)
    recurrent_weights = ()
    gates: int

    def __init__(self, config: StateConfig):
        super().__init__(config)
        C, H = config.input_size, config.hidden_size
        self.weight_x = nn.Parameter(torch.empty(C, self.gates * H))
        self.bias = nn.Parameter(torch.zeros(self.gates * H))
        glorot_(self.weight_x, gates=self.gates)

    def input_maps(self):
        return ((self.weight_x, self.bias),)

    def split_gates(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k and v, each [..., H], from the projection."""
        raise NotImplementedError(f"{type(self).__name__} has no gates")

    def step(self, g_t, state, noise_t):
        (h,) = state
        k, v = self.split_gates(g_t[0])
        new = torch.sigmoid(-k) * h + torch.sigmoid(k) * positive(v)
        new = self.zoned(h, new, noise_t)
        return new, (new,)

    def run_fused(self, g, state, mask_TB, noise, plan):
        (h,), rate = state, self.config.zoneout
        # States that are summed over time need more digits than bfloat16 has.
        wide = torch.promote_types(g[0].dtype, torch.float32)
        k, v = self.split_gates(g[0].to(wide))
        a, b = torch.sigmoid(-k), torch.sigmoid(k) * positive(v)
        kept = noise_at(noise, "zoneout")
        if kept is not None:
            a, b = a.masked_fill(kept, 1.0), b.masked_fill(kept, 0.0)
        elif rate:
            a, b = rate + (1.0 - rate) * a, (1.0 - rate) * b
        if mask_TB is not None:
            padding = ~mask_TB.unsqueeze(-1)
            a, b = a.masked_fill(padding, 1.0), b.masked_fill(padding, 0.0)
        if noise is not None and "resets" in noise:
            a = a.masked_fill(noise["resets"], 0.0)
        states = linear_scan(a, b, h.to(wide))
        y = states if mask_TB is None else states.masked_fill(padding, 0.0)
        # A copy, because the output may be changed in place.
        return y.to(g[0].dtype), (states[-1].to(h.dtype, copy=True),)


def positive(v: Tensor) -> Tensor:
    """Computes g of the module's docstring."""
    return torch.where(v >= 0, v + 0.5, torch.sigmoid(v))


@register_cell("mingru", StateConfig, naive_min_gru, tests=(dict(zoneout=0.1),))
class MinGRU(MinimalCell):
    """minGRU; see the module's docstring. Columns of the weight: z, h."""

    operation = "linear_scan"
    gates = 2

    def split_gates(self, g):
        k, v = g.chunk(2, dim=-1)
        return k, v


@register_cell("minlstm", StateConfig, naive_min_lstm, tests=(dict(zoneout=0.1),))
class MinLSTM(MinimalCell):
    """minLSTM; see the module's docstring. Columns of the weight: f, i, h."""

    operation = "linear_scan"
    gates = 3

    def split_gates(self, g):
        f, i, v = g.chunk(3, dim=-1)
        return logsigmoid(i) - logsigmoid(f), v
