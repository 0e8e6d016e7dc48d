"""Mogrifier LSTM (Melis, Kočiský and Blunsom 2020, arXiv 1909.01792, section 2).

Before a step of an LSTM, input and state gate each other in ``rounds`` rounds (5). The odd ones change
x, the even ones h::

    x <- 2 sigmoid(h Q_i) * x   (i odd),   h <- 2 sigmoid(x R_i) * h   (i even)

Then the LSTM's equations follow, with the changed x and h in its matrices. With ``rounds=0`` the cell is the
LSTM. With ``rank`` k, every Q_i and R_i is a product of two matrices, [., k] and [k, .].

h-detach and Gal dropout act on h before the first round.

Shapes: B batch, C input, H hidden; gates i, f, g, o in every weight's columns.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.contract import glorot_, orthogonal_
from rhhn_fairseq.cells.lstm import NOISY, GatedCell, GatedConfig, naive_update
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, sigmoid
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.ops.matmul.gemm import affine


@dataclass(frozen=True, kw_only=True)
class MogrifierConfig(GatedConfig):
    """Options of the Mogrifier LSTM."""

    rounds: int = option(5, help="rounds in which input and state gate each other", low=0, high=1000)
    rank: int = option(0, help="rank of the matrices of these rounds; 0: full", low=0)


@over_time
def naive_mogrifier(p, config, x, state, noise):
    """The module's equations in numpy for one step."""
    h, c = state
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    for i in range(config.rounds):
        gate = (x if i % 2 else seen) @ p[f"weight_rounds.{i}"]
        if config.rank:
            gate = gate @ p[f"weight_up.{i}"]
        if i % 2:
            seen = 2.0 * sigmoid(gate) * seen
        else:
            x = 2.0 * sigmoid(gate) * x
    sums = np.split(x @ p["weight_x"] + seen @ p["weight_h"] + p["bias"], 4)
    h, c = naive_update(sums, h, c, config, noise)
    return h, (h, c)


@register_cell("mogrifier_lstm", MogrifierConfig, naive_mogrifier, tests=(NOISY | dict(rounds=4, rank=2),))
class MogrifierLSTM(GatedCell):
    """Mogrifier LSTM; see the module's docstring. State: (h [B, H], c [B, H])."""

    config: MogrifierConfig
    affine_weights = ("weight_x", "weight_h", "weight_rounds", "weight_up")

    def __init__(self, config: MogrifierConfig):
        super().__init__(config)
        C, H, k = config.input_size, config.hidden_size, config.rank
        self.weight_x = nn.Parameter(torch.empty(C, 4 * H))
        self.weight_h = nn.Parameter(torch.empty(H, 4 * H))
        self.bias = nn.Parameter(torch.zeros(4 * H))
        self.weight_rounds, self.weight_up = nn.ParameterList(), nn.ParameterList()
        for i in range(config.rounds):
            read, changed = (C, H) if i % 2 else (H, C)
            self.weight_rounds.append(torch.empty(read, k or changed))
            if k:
                self.weight_up.append(torch.empty(k, changed))
        # The matrices of the even rounds read x.
        self.recurrent_weights = ("weight_h", *(f"weight_rounds.{i}" for i in range(0, config.rounds, 2)))
        for weight in (*self.weight_rounds, *self.weight_up):
            glorot_(weight)
        glorot_(self.weight_x, gates=4)
        orthogonal_(self.weight_h, gates=4)

    def input_maps(self):
        # The state changes x before a matrix reads it, so the step gets x itself.
        return ((torch.eye(self.config.input_size, dtype=self.bias.dtype, device=self.bias.device), None),)

    def project(self, x_TBC, gemm=None):
        return (x_TBC,)

    def step(self, g_t, state, noise_t):
        (x,), (h, c) = g_t, state
        seen = self.recurrent_input(h, noise_t)
        for i in range(self.config.rounds):
            if i % 2:
                seen = self._gate(i, x) * seen
            else:
                x = self._gate(i, seen) * x
        a = affine(seen, self.weight_h, affine(x, self.weight_x, self.bias))
        return self.update(a.chunk(4, dim=-1), h, c, noise_t)

    def _gate(self, i: int, read: Tensor) -> Tensor:
        """Returns the factors of a round, between 0 and 2."""
        gate = affine(read, self.weight_rounds[i])
        return 2.0 * torch.sigmoid(affine(gate, self.weight_up[i]) if self.config.rank else gate)
