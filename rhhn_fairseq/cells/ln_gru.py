"""GRU with layer normalisation of the joint sum, as in DreamerV2 (Hafner et al. 2021).

Equations (order r, c, u in every weight's columns)::

    r, c, u = LN(x W_x + h W_h)
    h' = u' * tanh(sigmoid(r) * c) + (1 - u') * h,   u' = sigmoid(u + update_bias)

One normalisation covers all 3 H sums. The reset gate multiplies the sum, not h. There is no bias but the
normalisation's; DreamerV2's program (common/nets.py) also adds one to the sums before it.

h-detach cuts the gradient where h enters a matrix, not through the carry (1 - u') * h.

Shapes: C input, H hidden.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.cells.config import NORM_EPSILON, option
from rhhn_fairseq.cells.contract import OneMatrixEach
from rhhn_fairseq.cells.gru import GRUConfig
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, sigmoid, zone
from rhhn_fairseq.cells.numpy_math import layer_norm as naive_layer_norm
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.loop import noise_at
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.regularise import dropout, layer_norm, lerp


@dataclass(frozen=True, kw_only=True)
class LNGRUConfig(GRUConfig):
    """Options of the GRU with layer normalisation."""

    update_bias: float = option(-1.0, help="constant added to the update gate; below 0 it keeps more of h")
    norm_epsilon: float = NORM_EPSILON


@over_time
def naive_ln_gru(p, config, x, state, noise):
    """The module's equations in numpy for one step."""
    (h,) = state
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    sums = x @ p["weight_x"] + seen @ p["weight_h"]
    norm = p["gate_norm_weight"], p["gate_norm_bias"], config.norm_epsilon
    r, c, u = np.split(naive_layer_norm(sums, *norm), 3)
    new = drop(np.tanh(sigmoid(r) * c), config.recurrent_dropout, at(noise, "update"))
    u = sigmoid(u + config.update_bias)
    h = zone(h, u * new + (1.0 - u) * h, config.zoneout, at(noise, "zoneout"))
    return h, (h,)


@register_cell(
    "ln_gru",
    LNGRUConfig,
    naive_ln_gru,
    tests=(
        dict(recurrent_dropout=0.3, gal_dropout=0.2, zoneout=0.1, h_detach=0.5)
        | dict(update_bias=0.5, norm_epsilon=0.1),
    ),
)
class LNGRU(OneMatrixEach, Cell):
    """GRU with layer normalisation; see the module's docstring. State: (h [B, H],)."""

    config: LNGRUConfig
    input_bias = False

    def __init__(self, config: LNGRUConfig):
        super().__init__(config)
        self.add_matrices(gates=3)
        self.gate_norm_weight = nn.Parameter(torch.ones(3 * config.hidden_size))
        self.gate_norm_bias = nn.Parameter(torch.zeros(3 * config.hidden_size))

    def step(self, g_t, state, noise_t, matrices=None):
        (weight_h,), (h,), config = matrices or (self.weight_h,), state, self.config
        sums = affine(self.recurrent_input(h, noise_t), weight_h, g_t[0])
        norm = self.gate_norm_weight, self.gate_norm_bias, config.norm_epsilon
        r, c, u = layer_norm(sums, *norm).chunk(3, dim=-1)
        new = torch.tanh(torch.sigmoid(r) * c)
        new = dropout(new, config.recurrent_dropout, noise_at(noise_t, "update"))
        new = lerp(h, new, torch.sigmoid(u + config.update_bias))
        new = self.zoned(h, new, noise_t)
        return new, (new,)
