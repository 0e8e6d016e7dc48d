"""LSTM (Hochreiter and Schmidhuber 1997, with forget gate) and LSTM with layer normalisation.

Equations (gate order i, f, g, o in every weight's columns, as in torch.nn.LSTM)::

    i, f, g, o = x W_x + h W_h + b
    c' = sigmoid(f + forget_bias) * c + sigmoid(i) * tanh(g)
    h' = sigmoid(o) * tanh(c')

With layer normalisation (Ha, Dai, Le 2016 and its reference implementation supercell), each gate's sum
is normalised before the forget bias is added, and c' inside the output's tanh.

Departures from torch.nn.LSTM: one bias instead of two, and the forget bias is a constant, added to a
bias that starts at zero. With ``forget_bias=0`` the two are equal to rounding.

Shapes: T time, B batch, C input, H hidden, G = 4 H.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.cells.config import NORM_EPSILON, CellConfig, option
from rhhn_fairseq.cells.contract import OneMatrixEach
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, sigmoid, zone
from rhhn_fairseq.cells.numpy_math import layer_norm as naive_layer_norm
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import lstm as op
from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.backends import torch_nn
from rhhn_fairseq.ops.loop import noise_at
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.regularise import (
    LAYER_NORM_EPS,
    detach_by_coin,
    draw_mask,
    dropout,
    layer_norm,
    zoneout,
)
from rhhn_fairseq.ops.sequence import gather_masks


@dataclass(frozen=True, kw_only=True)
class GatedConfig(CellConfig):
    """Options of every cell whose state is (h, c)."""

    forget_bias: float = option(1.0, help="constant added to the forget gate")
    recurrent_dropout: float = option(
        0.0, help="drop units of the update tanh(g) (Semeniuta et al.)", low=0, below=1
    )
    recurrent_mask: str = option(
        "step",
        help="draw the recurrent dropout's mask for every step or once per sequence",
        choices=("step", "sequence"),
    )
    zoneout_c: float = option(0.0, help="probability that a unit of c keeps its value", low=0, below=1)
    c_detach: float = option(
        0.0, help="probability, per step, that no gradient flows through c", low=0, high=1
    )


@dataclass(frozen=True, kw_only=True)
class LSTMConfig(GatedConfig):
    """Options of the LSTM."""

    layer_norm: bool = option(False, help="normalise the gates and c, in a hypernetwork too")
    norm_epsilon: float = NORM_EPSILON

    def __post_init__(self):
        super().__post_init__()
        if not self.layer_norm and self.norm_epsilon != LAYER_NORM_EPS:
            raise UsageError(f"norm_epsilon={self.norm_epsilon} has no effect without layer_norm")


class GatedCell(Cell):
    """Base of the cells with the state (h, c) and the LSTM's last equations; not a cell by itself."""

    config: GatedConfig
    gate_norm_weight: nn.Parameter
    gate_norm_bias: nn.Parameter
    c_norm_weight: nn.Parameter
    c_norm_bias: nn.Parameter

    def __init__(self, config: GatedConfig):
        super().__init__(config)
        self.state_sizes = (config.hidden_size, config.hidden_size)

    def add_norm(self) -> None:
        """Adds the parameters of layer normalisation, of the gates' sums and of c."""
        for name, size in (("gate_norm", 4 * self.config.hidden_size), ("c_norm", self.config.hidden_size)):
            setattr(self, f"{name}_weight", nn.Parameter(torch.ones(size)))
            setattr(self, f"{name}_bias", nn.Parameter(torch.zeros(size)))

    def norm(self) -> tuple[torch.Tensor, ...]:
        """Returns the parameters of layer normalisation; empty without it."""
        if not getattr(self.config, "layer_norm", False):
            return ()
        return self.gate_norm_weight, self.gate_norm_bias, self.c_norm_weight, self.c_norm_bias

    def sample_noise(self, T, B, device=None, generator=None):
        noise, config = super().sample_noise(T, B, device, generator), self.config
        if config.zoneout_c:
            noise["zoneout_c"] = draw_mask((T, B, config.hidden_size), config.zoneout_c, device, generator)
        if config.c_detach:
            noise["c_detach"] = draw_mask((T, 1, 1), config.c_detach, device, generator)
        return noise

    def numbers(self) -> op.GatedNumbers:
        """Returns the configuration in the form that fused operations read."""
        config = self.config
        keep_scale = 1.0 / (1.0 - config.recurrent_dropout)
        epsilon = getattr(config, "norm_epsilon", LAYER_NORM_EPS)
        return op.GatedNumbers(config.forget_bias, keep_scale, config.zoneout, config.zoneout_c, epsilon)

    def update(self, gates, h_BH, c_BH, noise_t, normalise_c=None):
        """Returns the output and the next state from the four gates' sums i, f, g, o ([B, H] each)."""
        config = self.config
        i, f, g, o = gates
        g = dropout(torch.tanh(g), config.recurrent_dropout, noise_at(noise_t, "update"))
        kept = detach_by_coin(c_BH, noise_at(noise_t, "c_detach"))
        c = torch.sigmoid(f + config.forget_bias) * kept + torch.sigmoid(i) * g
        h = torch.sigmoid(o) * torch.tanh(c if normalise_c is None else normalise_c(c))
        h = self.zoned(h_BH, h, noise_t)
        c = zoneout(c_BH, c, config.zoneout_c, noise_at(noise_t, "zoneout_c"))
        return h, (h, c)

    def normalise_c(self, c_BH):
        """Returns c normalised for the output's tanh."""
        return layer_norm(c_BH, self.c_norm_weight, self.c_norm_bias, self.numbers().epsilon)


def naive_update(sums, h, c, config, noise, p=None):
    """Computes the LSTM's last equations for one sequence from the sums [4, H] of the gates i, f, g, o.

    Args:
        p: the parameters, if they normalise the sums and c.
    """
    if p is not None:
        gains, shifts = np.split(p["gate_norm_weight"], 4), np.split(p["gate_norm_bias"], 4)
        norms = zip(sums, gains, shifts, strict=True)
        sums = [naive_layer_norm(*each, config.norm_epsilon) for each in norms]
    i, f, g, o = sums
    update = drop(np.tanh(g), config.recurrent_dropout, at(noise, "update"))
    c_new = inner = sigmoid(f + config.forget_bias) * c + sigmoid(i) * update
    if p is not None:
        inner = naive_layer_norm(c_new, p["c_norm_weight"], p["c_norm_bias"], config.norm_epsilon)
    h = zone(h, sigmoid(o) * np.tanh(inner), config.zoneout, at(noise, "zoneout"))
    return h, zone(c, c_new, config.zoneout_c, at(noise, "zoneout_c"))


@over_time
def naive_lstm(p, config, x, state, noise):
    """The module's equations in numpy for one step."""
    h, c = state
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    sums = np.split(x @ p["weight_x"] + seen @ p["weight_h"] + p["bias"], 4)
    h, c = naive_update(sums, h, c, config, noise, p if config.layer_norm else None)
    return h, (h, c)


NOISY = dict(recurrent_dropout=0.3, gal_dropout=0.2, zoneout=0.1, zoneout_c=0.2, h_detach=0.5, c_detach=0.5)
"""Options that switch on every regulariser of a cell with the state (h, c), for the tests."""


@register_cell(
    "lstm", LSTMConfig, naive_lstm, tests=(NOISY, dict(recurrent_dropout=0.3, recurrent_mask="sequence"))
)
@register_cell("ln_lstm", LSTMConfig, naive_lstm, tests=(NOISY | dict(norm_epsilon=0.1),), layer_norm=True)
class LSTM(OneMatrixEach, GatedCell):
    """LSTM, optionally with layer normalisation; see the module's docstring.

    State: (h [B, H], c [B, H]). Initialisation: orthogonal recurrent matrix for every gate and zero bias,
    as the HyperLSTM of Ha et al. 2016 (supercell); Glorot uniform input matrix for every gate, where
    supercell draws one for all gates. Their baseline LSTMs have orthogonal input matrices (section 4.1).
    """

    config: LSTMConfig
    operation = "lstm"

    def __init__(self, config: LSTMConfig):
        super().__init__(config)
        self.add_matrices(gates=4)
        self.bias = nn.Parameter(torch.zeros(4 * config.hidden_size))
        if config.layer_norm:
            self.add_norm()

    def step(self, g_t, state, noise_t, matrices=None):
        (weight_h,), (h, c) = matrices or (self.weight_h,), state
        a = affine(self.recurrent_input(h, noise_t), weight_h, g_t[0])
        if not self.config.layer_norm:
            return self.update(a.chunk(4, dim=-1), h, c, noise_t)
        a = layer_norm(a, self.gate_norm_weight, self.gate_norm_bias, self.config.norm_epsilon, gates=4)
        return self.update(a.chunk(4, dim=-1), h, c, noise_t, self.normalise_c)

    def run_fused(self, g, state, mask_TB, noise, plan):
        if plan.is_single_step:
            a = affine(state[0], self.weight_h, g[0][0])
            h, c = native.lstm_gates(a, state[1], self.config.forget_bias)
            # The output is a copy, because it may be changed in place.
            return h.unsqueeze(0).clone(), (h, c)
        masks = gather_masks(mask_TB, noise, self.config.gal_dropout, g[0])
        return op.lstm(g[0], state, self.weight_h, self.norm(), masks, self.numbers(), plan)

    def extras(self, mask_TB, noise):
        names = super().extras(mask_TB, noise)
        if self.config.layer_norm:
            names = ("layer normalisation", *names)
        return (*names, "zoneout") if self.config.zoneout_c and "zoneout" not in names else names

    def fits_few_rows(self, state):
        return state is not None and gemm.fits_few_rows(state[0], self.weight_h)

    def torch_weights(self):
        second = None
        if self.config.forget_bias:
            second = torch.zeros_like(self.bias)
            second.view(4, -1)[1] = self.config.forget_bias
        return torch_nn.Weights(self.weight_x.t(), self.weight_h.t(), self.bias, second)
