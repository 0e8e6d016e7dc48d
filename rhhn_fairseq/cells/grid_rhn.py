"""Recurrent highway network with the horizontal connections of a grid (Suarez 2017, section 6).

For the layers l = 0 .. L-1 of time step t::

    [h, t] = 1[l = 0] (x U + b_U) + s W_l + s_l V_l + b_l
    s = (1 - t) * s + dropout(t) * h

and then as in the RHN. s comes from the layer below, for l = 0 from the last layer of the previous step; s_l
is layer l's own state after the previous step. The paper says only that the connections were added. That
each has a separate matrix, and that every layer has one, is this project's reading.

h-detach cuts the gradient where states of the previous step enter W_0 and V_l, not through the carry. Gal
dropout applies one mask to every state that enters a matrix. Zoneout acts on the output state.

Shapes: T time, B batch, C input, H hidden, L depth.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.contract import orthogonal_
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.rhn import NOISY, HighwayConfig, highway, init_bias_, layer_masks, naive_highway
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.loop import noise_at
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.regularise import detach_by_coin, dropout


@dataclass(frozen=True, kw_only=True)
class GridRHNConfig(HighwayConfig):
    """Options of the grid RHN."""

    rhn_depth: int = option(7, help="layers in one time step", low=2, high=1000)


@over_time
def naive_grid_rhn(p, config, x, state, noise):
    """The module's equations in numpy for one step; a state of None is zero."""
    H, L = config.hidden_size, config.rhn_depth
    s, others = (np.zeros(H), np.zeros((L - 1) * H)) if state is None else state
    before = [*others.reshape(L - 1, H), s]
    mask, gal, start, after = at(noise, "update"), at(noise, "gal"), before[-1], []
    s = start
    for layer in range(L):
        a = drop(s, config.gal_dropout, gal) @ p[f"weight_s.{layer}"] + p[f"bias_s.{layer}"]
        a = a + drop(before[layer], config.gal_dropout, gal) @ p[f"weight_grid.{layer}"]
        if layer == 0:
            a = a + x @ p["weight_x"] + p["bias_x"]
        keep = None if mask is None else mask[layer * H : (layer + 1) * H]
        s = naive_highway(a[:H], a[H:], s, config.recurrent_dropout, keep)
        after.append(s)
    after[-1] = zone(start, s, config.zoneout, at(noise, "zoneout"))
    return after[-1], (after[-1], np.concatenate(after[:-1]))


@register_cell("grid_rhn", GridRHNConfig, naive_grid_rhn, tests=(NOISY, dict(rhn_depth=2)))
class GridRHN(Cell):
    """Grid RHN; see the module's docstring. State: (s [B, H], the other layers' states [B, (L - 1) H]).

    Initialised as the RHN is: every matrix orthogonal with [h, t] as one matrix, biases uniform.
    """

    config: GridRHNConfig
    affine_weights = ("weight_x", "weight_s", "weight_grid")
    recurrent_weights = ("weight_s", "weight_grid")

    def __init__(self, config: GridRHNConfig):
        super().__init__(config)
        C, H, L = config.input_size, config.hidden_size, config.rhn_depth
        self.state_sizes, self.update_size = (H, (L - 1) * H), L * H
        self.weight_x = nn.Parameter(torch.empty(C, 2 * H))
        self.bias_x = nn.Parameter(torch.empty(2 * H))
        self.weight_s = nn.ParameterList(torch.empty(H, 2 * H) for _ in range(L))
        self.weight_grid = nn.ParameterList(torch.empty(H, 2 * H) for _ in range(L))
        self.bias_s = nn.ParameterList(torch.empty(2 * H) for _ in range(L))
        for weight in (self.weight_x, *self.weight_s, *self.weight_grid):
            orthogonal_(weight)
        for bias, fan_in in ((self.bias_x, C), *((bias, H) for bias in self.bias_s)):
            init_bias_(bias, fan_in)

    def input_maps(self):
        return ((self.weight_x, self.bias_x),)

    def state_matrices(self):
        lists = {"weight_s": self.weight_s, "weight_grid": self.weight_grid}
        return {f"{name}.{layer}": w for name, weights in lists.items() for layer, w in enumerate(weights)}

    def step(self, g_t, state, noise_t, matrices=None):
        matrices = matrices or (*self.weight_s, *self.weight_grid)
        (old, others), config = state, self.config
        coin, gal = noise_at(noise_t, "h_detach"), noise_at(noise_t, "gal")
        before = (*others.split(config.hidden_size, dim=-1), old)
        s, after = old, []
        for layer, mask in enumerate(layer_masks(noise_t, "update", config.rhn_depth)):
            seen = detach_by_coin(s, coin) if layer == 0 else s
            seen = dropout(seen, config.gal_dropout, gal)
            a = affine(seen, matrices[layer], self.bias_s[layer])
            if layer == 0:
                a = a + g_t[0]
            own = dropout(detach_by_coin(before[layer], coin), config.gal_dropout, gal)
            a = affine(own, matrices[config.rhn_depth + layer], a)
            s = highway(a, s, config.recurrent_dropout, mask)
            after.append(s)
        s = self.zoned(old, s, noise_t)
        return s, (s, torch.cat(after[:-1], dim=-1))
