"""GRU (Cho et al. 2014), with the reset gate after the recurrent matrix, as in torch.nn.GRU.

Equations (gate order r, z, n in every weight's columns)::

    r = sigmoid(x W_xr + h W_hr + b_r)
    z = sigmoid(x W_xz + h W_hz + b_z)
    n = tanh(x W_xn + b_n + r * (h W_hn + b_hn))
    h' = (1 - z) * n + z * h

Departure from torch.nn.GRU: r and z have one bias each instead of two, because only the sum matters.
h-detach cuts the gradient where h enters a matrix, not through the carry z * h.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.cells.config import CellConfig, option
from rhhn_fairseq.cells.contract import OneMatrixEach
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, sigmoid, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.backends import torch_nn
from rhhn_fairseq.ops.loop import noise_at
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.regularise import dropout, lerp


@dataclass(frozen=True, kw_only=True)
class GRUConfig(CellConfig):
    """Options of the GRU."""

    recurrent_dropout: float = option(
        0.0, help="drop units of the update n (Semeniuta et al.)", low=0, below=1
    )


@over_time
def naive_gru(p, config, x, state, noise):
    """The module's equations in numpy for one step."""
    (h,) = state
    H = config.hidden_size
    R, Z, N = (slice(k * H, (k + 1) * H) for k in range(3))
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    r = sigmoid(x @ p["weight_x"][:, R] + seen @ p["weight_h"][:, R] + p["bias"][R])
    z = sigmoid(x @ p["weight_x"][:, Z] + seen @ p["weight_h"][:, Z] + p["bias"][Z])
    recurrent = seen @ p["weight_h"][:, N] + p["bias_n"]
    n = np.tanh(x @ p["weight_x"][:, N] + p["bias"][N] + r * recurrent)
    n = drop(n, config.recurrent_dropout, at(noise, "update"))
    h = zone(h, (1.0 - z) * n + z * h, config.zoneout, at(noise, "zoneout"))
    return h, (h,)


@register_cell(
    "gru",
    GRUConfig,
    naive_gru,
    tests=(dict(recurrent_dropout=0.3, gal_dropout=0.2, zoneout=0.1, h_detach=0.5),),
)
class GRU(OneMatrixEach, Cell):
    """GRU; see the module's docstring. State: (h [B, H],). Initialised as the LSTM is."""

    config: GRUConfig
    operation = "gru"

    def __init__(self, config: GRUConfig):
        super().__init__(config)
        self.add_matrices(gates=3)
        self.bias = nn.Parameter(torch.zeros(3 * config.hidden_size))
        self.bias_n = nn.Parameter(torch.zeros(config.hidden_size))

    def step(self, g_t, state, noise_t, matrices=None):
        (weight_h,), (h,), config = matrices or (self.weight_h,), state, self.config
        H = config.hidden_size
        seen = self.recurrent_input(h, noise_t)
        x_rz, x_n = g_t[0].split((2 * H, H), dim=-1)
        h_rz, h_n = affine(seen, weight_h).split((2 * H, H), dim=-1)
        r, z = torch.sigmoid(x_rz + h_rz).chunk(2, dim=-1)
        n = torch.tanh(x_n + r * (h_n + self.bias_n))
        n = dropout(n, config.recurrent_dropout, noise_at(noise_t, "update"))
        new = lerp(n, h, z)
        new = self.zoned(h, new, noise_t)
        return new, (new,)

    def torch_weights(self):
        second = nn.functional.pad(self.bias_n, (2 * len(self.bias_n), 0))
        return torch_nn.Weights(self.weight_x.t(), self.weight_h.t(), self.bias, second)
