"""LSTMs with multiplicative input: mLSTM (Krause et al. 2016) and MI-LSTM (Wu et al. 2016).

mLSTM (Ha et al. 2016, equation 6, with the LSTM's gates)::

    m = (x W_mx) * (h W_mh)
    i, f, g, o = x W_x + m W_m + b

MI-LSTM (Ha et al. 2016, equation 7, for each gate; ``u = h W_h``, ``v = x W_x``)::

    i, f, g, o = alpha * v * u + beta_1 * u + beta_2 * v + b

followed by the LSTM's equations. Gate order i, f, g, o in every weight's columns.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.contract import OneMatrixEach, glorot_, orthogonal_
from rhhn_fairseq.cells.lstm import NOISY, GatedCell, GatedConfig, naive_update
from rhhn_fairseq.cells.numpy_math import at, drop, over_time
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.ops.matmul.gemm import affine


@dataclass(frozen=True, kw_only=True)
class MLSTMConfig(GatedConfig):
    """Options of the mLSTM."""


@dataclass(frozen=True, kw_only=True)
class MILSTMConfig(GatedConfig):
    """Options of the MI-LSTM."""

    alpha_init: float = option(1.0, help="initial value of alpha, the weight of the product of both inputs")
    beta_init: float = option(1.0, help="initial value of beta_1 and beta_2, the weights of each input alone")


@over_time
def naive_mlstm(p, config, x, state, noise):
    """The mLSTM's equations in numpy for one step."""
    h, c = state
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    m = (x @ p["weight_mx"]) * (seen @ p["weight_mh"])
    sums = np.split(x @ p["weight_x"] + m @ p["weight_m"] + p["bias"], 4)
    h, c = naive_update(sums, h, c, config, noise)
    return h, (h, c)


@over_time
def naive_mi_lstm(p, config, x, state, noise):
    """The MI-LSTM's equations in numpy for one step."""
    h, c = state
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    u, v = seen @ p["weight_h"], x @ p["weight_x"]
    a = p["alpha"] * v * u + p["beta_1"] * u + p["beta_2"] * v + p["bias"]
    h, c = naive_update(np.split(a, 4), h, c, config, noise)
    return h, (h, c)


@register_cell("mlstm", MLSTMConfig, naive_mlstm, tests=(NOISY,))
class MLSTM(GatedCell):
    """mLSTM; see the module's docstring. State: (h [B, H], c [B, H])."""

    affine_weights = ("weight_x", "weight_m", "weight_mx", "weight_mh")
    keeps_initial_values = True
    recurrent_weights = ("weight_m", "weight_mh")

    def __init__(self, config: MLSTMConfig):
        super().__init__(config)
        C, H = config.input_size, config.hidden_size
        self.weight_mx = nn.Parameter(torch.empty(C, H))
        self.weight_mh = nn.Parameter(torch.empty(H, H))
        self.weight_x = nn.Parameter(torch.empty(C, 4 * H))
        self.weight_m = nn.Parameter(torch.empty(H, 4 * H))
        self.bias = nn.Parameter(torch.zeros(4 * H))
        glorot_(self.weight_mx)
        orthogonal_(self.weight_mh)
        glorot_(self.weight_x, gates=4)
        orthogonal_(self.weight_m, gates=4)

    def input_maps(self):
        return (self.weight_x, self.bias), (self.weight_mx, None)

    def state_matrices(self):
        return {"weight_mh": self.weight_mh, "weight_m": self.weight_m}

    def step(self, g_t, state, noise_t, matrices=None):
        inner, outer = matrices or (self.weight_mh, self.weight_m)
        (h, c), (gates, m_x) = state, g_t
        m = m_x * affine(self.recurrent_input(h, noise_t), inner)
        a = affine(m, outer, gates)
        return self.update(a.chunk(4, dim=-1), h, c, noise_t)


@register_cell("mi_lstm", MILSTMConfig, naive_mi_lstm, tests=(NOISY, dict(alpha_init=2.0, beta_init=0.5)))
class MILSTM(OneMatrixEach, GatedCell):
    """MI-LSTM; see the module's docstring. State: (h [B, H], c [B, H])."""

    config: MILSTMConfig
    input_bias = False

    def __init__(self, config: MILSTMConfig):
        super().__init__(config)
        H = config.hidden_size
        self.add_matrices(gates=4)
        self.alpha = nn.Parameter(torch.full((4 * H,), float(config.alpha_init)))
        self.beta_1 = nn.Parameter(torch.full((4 * H,), float(config.beta_init)))
        self.beta_2 = nn.Parameter(torch.full((4 * H,), float(config.beta_init)))
        self.bias = nn.Parameter(torch.zeros(4 * H))

    def step(self, g_t, state, noise_t, matrices=None):
        (weight_h,), (h, c), (v,) = matrices or (self.weight_h,), state, g_t
        u = affine(self.recurrent_input(h, noise_t), weight_h)
        a = u * torch.addcmul(self.beta_1, self.alpha, v) + torch.addcmul(self.bias, self.beta_2, v)
        return self.update(a.chunk(4, dim=-1), h, c, noise_t)
