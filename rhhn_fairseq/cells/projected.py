"""LSTM with a projected output (Sak, Senior and Beaufays 2014, "LSTM based RNN architectures for large scale
acoustic modeling", without the non-recurrent projection), as torch.nn.LSTM has it with ``proj_size``.

Equations (gate order i, f, g, o)::

    i, f, g, o = x W_x + h W_h + b
    c' = sigmoid(f + forget_bias) * c + sigmoid(i) * tanh(g)
    h' = (sigmoid(o) * tanh(c')) W_r

Shapes: T time, B batch, C input, P width of h (``hidden_size``), M width of c.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.cells.config import WIDEST, CellConfig, option
from rhhn_fairseq.cells.contract import glorot_, orthogonal_
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, sigmoid, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.loop import noise_at
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.regularise import zoneout


@dataclass(frozen=True, kw_only=True)
class ProjectedLSTMConfig(CellConfig):
    """Options of the LSTM with a projected output."""

    memory_size: int = option(0, help="width of c; 0 for hidden_size", low=0, high=WIDEST)
    forget_bias: float = option(1.0, help="constant added to the forget gate")


@over_time
def naive_projected(p, config, x, state, noise):
    """The module's equations in numpy for one step."""
    h, c = state
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    i, f, g, o = np.split(x @ p["weight_x"] + seen @ p["weight_h"] + p["bias"], 4)
    c = sigmoid(f + config.forget_bias) * c + sigmoid(i) * np.tanh(g)
    h = zone(h, (sigmoid(o) * np.tanh(c)) @ p["weight_r"], config.zoneout, at(noise, "zoneout"))
    return h, (h, c)


@register_cell(
    "projected_lstm",
    ProjectedLSTMConfig,
    naive_projected,
    tests=(dict(memory_size=7, gal_dropout=0.2, zoneout=0.1, h_detach=0.5),),
)
class ProjectedLSTM(Cell):
    """LSTM with a projected output. State: (h [B, P], c [B, M]). Initialised as the LSTM is."""

    config: ProjectedLSTMConfig
    affine_weights = ("weight_x", "weight_h", "weight_r")

    def __init__(self, config: ProjectedLSTMConfig):
        super().__init__(config)
        C, P, M = config.input_size, config.hidden_size, config.memory_size or config.hidden_size
        self.state_sizes = (P, M)
        self.weight_x = nn.Parameter(torch.empty(C, 4 * M))
        self.weight_h = nn.Parameter(torch.empty(P, 4 * M))
        self.weight_r = nn.Parameter(torch.empty(M, P))
        self.bias = nn.Parameter(torch.zeros(4 * M))
        glorot_(self.weight_x, gates=4)
        orthogonal_(self.weight_h, gates=4)
        glorot_(self.weight_r)

    def input_maps(self):
        return ((self.weight_x, self.bias),)

    def step(self, g_t, state, noise_t):
        h, c = state
        i, f, g, o = affine(self.recurrent_input(h, noise_t), self.weight_h, g_t[0]).chunk(4, dim=-1)
        c = torch.sigmoid(f + self.config.forget_bias) * c + torch.sigmoid(i) * torch.tanh(g)
        new = affine(torch.sigmoid(o) * torch.tanh(c), self.weight_r)
        new = zoneout(h, new, self.config.zoneout, noise_at(noise_t, "zoneout"))
        return new, (new, c)
