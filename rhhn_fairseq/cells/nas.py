"""The recurrent cell that a search found (Zoph and Le 2017, arXiv 1611.01578; as TensorFlow's NASCell).

Equations, with eight sums i_0 .. i_7 of the input and m_0 .. m_7 of the state::

    i = x W_x,   m = h W_h + b
    a_0, a_2, a_5, a_7 = sigmoid(i + m),   a_4, a_6 = tanh(i + m)
    a_1 = relu(i_1 + m_1),   a_3 = relu(i_3 m_3)
    c' = tanh(tanh(a_0 a_1) + c) * tanh(a_2 + a_3)
    h' = tanh(c' * tanh(tanh(a_4 a_5) + sigmoid(a_6 + a_7)))

h-detach cuts the gradient where h enters the matrix.

Shapes: C input, H hidden; the sums are blocks of H columns in their order.
"""

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.cells.config import CellConfig
from rhhn_fairseq.cells.contract import OneMatrixEach
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, sigmoid, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.matmul.gemm import affine


@over_time
def naive_nas(p, config, x, state, noise):
    """The module's equations in numpy for one step."""
    h, c = state
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    i = np.split(x @ p["weight_x"], 8)
    m = np.split(seen @ p["weight_h"] + p["bias"], 8)
    a0, a2, a5, a7 = (sigmoid(i[k] + m[k]) for k in (0, 2, 5, 7))
    a4, a6 = (np.tanh(i[k] + m[k]) for k in (4, 6))
    a1, a3 = np.maximum(i[1] + m[1], 0.0), np.maximum(i[3] * m[3], 0.0)
    c = np.tanh(np.tanh(a0 * a1) + c) * np.tanh(a2 + a3)
    new = np.tanh(c * np.tanh(np.tanh(a4 * a5) + sigmoid(a6 + a7)))
    h = zone(h, new, config.zoneout, at(noise, "zoneout"))
    return h, (h, c)


@register_cell("nas", CellConfig, naive_nas, tests=(dict(gal_dropout=0.2, zoneout=0.1, h_detach=0.5),))
class NAS(OneMatrixEach, Cell):
    """NAS cell; see the module's docstring. State: (h [B, H], c [B, H])."""

    config: CellConfig
    input_bias = False

    def __init__(self, config: CellConfig):
        super().__init__(config)
        self.state_sizes = (config.hidden_size, config.hidden_size)
        self.add_matrices(gates=8)
        self.bias = nn.Parameter(torch.zeros(8 * config.hidden_size))

    def step(self, g_t, state, noise_t, matrices=None):
        (weight_h,), (h, c) = matrices or (self.weight_h,), state
        i, m = g_t[0], affine(self.recurrent_input(h, noise_t), weight_h) + self.bias
        a0, a1, a2, _, a4, a5, a6, a7 = (i + m).chunk(8, dim=-1)
        a3 = torch.relu(i.chunk(8, dim=-1)[3] * m.chunk(8, dim=-1)[3])
        memory = torch.tanh(torch.tanh(torch.sigmoid(a0) * torch.relu(a1)) + c)
        c = memory * torch.tanh(torch.sigmoid(a2) + a3)
        inner = torch.sigmoid(torch.tanh(a6) + torch.sigmoid(a7))
        new = torch.tanh(c * torch.tanh(torch.tanh(torch.tanh(a4) * torch.sigmoid(a5)) + inner))
        new = self.zoned(h, new, noise_t)
        return new, (new, c)
