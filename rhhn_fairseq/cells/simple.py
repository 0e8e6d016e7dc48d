"""Simple recurrent networks: Elman (1990), Jordan (1986) and IRNN (Le, Jaitly and Hinton 2015).

Elman::   h' = phi(x W_x + h W_h + b)
IRNN::    the same with phi = ReLU, W_h starting as the identity and b at zero
Jordan::  u = tanh(x W_x + y W_h + b),   y' = psi(u W_y + b_y)

In Jordan's network the recurrence runs through the output y, so y is the state and the output map is
part of the cell. h-detach cuts the gradient where the state enters W_h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.cells.config import CellConfig, option
from rhhn_fairseq.cells.contract import OneMatrixEach, glorot_, orthogonal_
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, sigmoid, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.matmul.gemm import affine

ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    "tanh": (torch.tanh, np.tanh),
    "relu": (torch.relu, lambda a: np.maximum(a, 0.0)),
    "sigmoid": (torch.sigmoid, sigmoid),
    "identity": (lambda a: a, lambda a: a),
}


@dataclass(frozen=True, kw_only=True)
class ElmanConfig(CellConfig):
    """Options of Elman's network."""

    activation: str = option("tanh", help="phi, the activation", choices=tuple(ACTIVATIONS))
    identity_init: bool = option(False, help="start W_h as the identity and W_x small (IRNN)")


@dataclass(frozen=True, kw_only=True)
class JordanConfig(CellConfig):
    """Options of Jordan's network."""

    inner_size: int = option(
        0, help="width of the hidden layer between state and output; 0 for hidden_size", low=0
    )
    activation: str = option("sigmoid", help="psi, the output's activation", choices=tuple(ACTIVATIONS))


@over_time
def naive_elman(p, config, x, state, noise):
    """Elman's equation in numpy for one step."""
    (h,) = state
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    a = x @ p["weight_x"] + seen @ p["weight_h"] + p["bias"]
    h = zone(h, ACTIVATIONS[config.activation][1](a), config.zoneout, at(noise, "zoneout"))
    return h, (h,)


@over_time
def naive_jordan(p, config, x, state, noise):
    """Jordan's equations in numpy for one step."""
    (y,) = state
    seen = drop(y, config.gal_dropout, at(noise, "gal"))
    u = np.tanh(x @ p["weight_x"] + seen @ p["weight_h"] + p["bias"])
    new = ACTIVATIONS[config.activation][1](u @ p["weight_y"] + p["bias_y"])
    y = zone(y, new, config.zoneout, at(noise, "zoneout"))
    return y, (y,)


NOISY = dict(gal_dropout=0.2, zoneout=0.1, h_detach=0.5)


@register_cell("elman", ElmanConfig, naive_elman, tests=(NOISY,))
@register_cell("irnn", ElmanConfig, naive_elman, activation="relu", identity_init=True)
class Elman(OneMatrixEach, Cell):
    """Elman's network and the IRNN; see the module's docstring. State: (h [B, H],).

    The IRNN's input weights start normal with standard deviation 0.001 (Le et al. 2015, section 4).
    """

    config: ElmanConfig

    def __init__(self, config: ElmanConfig):
        super().__init__(config)
        C, H = config.input_size, config.hidden_size
        self.weight_x = nn.Parameter(torch.empty(C, H))
        self.weight_h = nn.Parameter(torch.empty(H, H))
        self.bias = nn.Parameter(torch.zeros(H))
        if config.identity_init:
            nn.init.normal_(self.weight_x, std=0.001)
        else:
            glorot_(self.weight_x)
            orthogonal_(self.weight_h)
        self.adjust_initial_values()

    def adjust_initial_values(self):
        if self.config.identity_init:
            self.weight_h.data.zero_().fill_diagonal_(1.0)

    def step(self, g_t, state, noise_t, matrices=None):
        (weight_h,), (h,) = matrices or (self.weight_h,), state
        a = affine(self.recurrent_input(h, noise_t), weight_h, g_t[0])
        new = self.zoned(h, ACTIVATIONS[self.config.activation][0](a), noise_t)
        return new, (new,)


@register_cell("jordan", JordanConfig, naive_jordan, tests=(NOISY, dict(inner_size=5)))
class Jordan(OneMatrixEach, Cell):
    """Jordan's network; see the module's docstring. State: (y [B, H],), which is the output."""

    config: JordanConfig
    affine_weights = ("weight_x", "weight_h", "weight_y")

    def __init__(self, config: JordanConfig):
        super().__init__(config)
        C, H = config.input_size, config.hidden_size
        I = config.inner_size or H  # noqa: E741  (the width of the inner layer)
        self.weight_x = nn.Parameter(torch.empty(C, I))
        self.weight_h = nn.Parameter(torch.empty(H, I))
        self.bias = nn.Parameter(torch.zeros(I))
        self.weight_y = nn.Parameter(torch.empty(I, H))
        self.bias_y = nn.Parameter(torch.zeros(H))
        for weight in (self.weight_x, self.weight_y):
            glorot_(weight)
        orthogonal_(self.weight_h)

    def step(self, g_t, state, noise_t, matrices=None):
        (weight_h,), (y,) = matrices or (self.weight_h,), state
        u = torch.tanh(affine(self.recurrent_input(y, noise_t), weight_h, g_t[0]))
        new = ACTIVATIONS[self.config.activation][0](affine(u, self.weight_y, self.bias_y))
        new = self.zoned(y, new, noise_t)
        return new, (new,)
