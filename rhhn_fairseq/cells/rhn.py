"""Recurrent highway network (Zilly et al. 2016) in the form of Suarez 2017, equation 3.

For the layers l = 0 .. L-1 of one time step::

    [h, t] = 1[l = 0] (x U + b_U) + s W_l + b_l
    h, t = tanh(h), sigmoid(t)
    c = 1 - t                         (before dropout)
    t = dropout(t)                    (a fresh mask for every step and layer)
    s = c * s + t * h

The state carried to the next time step is the last layer's s. Input and recurrent biases are separate,
as in the paper's repository. There the first step of a sequence skips the recurrent map *and its bias*
in layer 0. ``first_step="skip"`` does the same for sequences that start without a state.

h-detach cuts the gradient where the previous step's s enters W_0, not through the carry c * s.

Shapes: T time, B batch, C input, H hidden, L depth.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import CellConfig, option
from rhhn_fairseq.cells.contract import orthogonal_
from rhhn_fairseq.cells.numpy_math import at, drop, sigmoid, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import highway as op
from rhhn_fairseq.ops.loop import noise_at
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.regularise import detach_by_coin, dropout, lerp
from rhhn_fairseq.ops.sequence import gather_masks


@dataclass(frozen=True, kw_only=True)
class HighwayConfig(CellConfig):
    """Options of every recurrent highway network."""

    rhn_depth: int = option(7, help="layers in one time step", low=1, high=1000)
    recurrent_dropout: float = option(0.0, help="drop units of the transform gate t", low=0, below=1)

    def check_hyper_size(self, hyper_size: int) -> None:
        """Raises UsageError if a hypernetwork of this width is wider than the main network."""
        if hyper_size > self.hidden_size:
            name = type(self).__name__.removesuffix("Config")
            raise UsageError(
                f"{name}: hyper_size={hyper_size} is larger than hidden_size={self.hidden_size}, "
                "the largest possible"
            )


@dataclass(frozen=True, kw_only=True)
class RHNConfig(HighwayConfig):
    """Options of the recurrent highway network."""

    first_step: str = option(
        "full",
        help="at the first step without a state, apply the recurrent bias of layer 0 or skip it",
        choices=("full", "skip"),
    )
    transform_bias: float = option(0.0, help="added to the biases of the transform gates at the start")


def highway(a_BG: Tensor, s_BH: Tensor, rate: float, keep_mask: Tensor | None) -> Tensor:
    """Computes one highway layer from the sums [h, t] ([B, 2 H]) and its input s."""
    h, t = a_BG.chunk(2, dim=-1)
    h, t = torch.tanh(h), torch.sigmoid(t)
    if keep_mask is None or rate == 0.0:
        return lerp(s_BH, h, t)
    return (1.0 - t) * s_BH + dropout(t, rate, keep_mask) * h


def layer_masks(noise_t, name: str, depth: int):
    """Splits a step's noise [B, L H] into one mask [B, H] per layer; in evaluation each is None."""
    mask = noise_at(noise_t, name)
    return (None,) * depth if mask is None else mask.chunk(depth, dim=-1)


def init_bias_(bias: Tensor, fan_in: int) -> None:
    """Fills a bias uniformly within +-1 / sqrt(fan_in), as torch.nn.Linear does (Suarez)."""
    nn.init.uniform_(bias, -(fan_in**-0.5), fan_in**-0.5)


def shift_transform_(biases: Iterable[Tensor], config: RHNConfig) -> None:
    """Adds ``transform_bias`` to the transform gates' part of every layer's bias [2 H]."""
    for bias in biases:
        bias.data[config.hidden_size :] += config.transform_bias


def naive_highway(h_sum, t_sum, s, rate, keep):
    """Computes one highway layer of one sequence."""
    h, t = np.tanh(h_sum), sigmoid(t_sum)
    return (1.0 - t) * s + drop(t, rate, keep) * h


def naive_rhn(p, config, x_TC, state, noise, all_layers=False):
    """The module's equations in numpy for one sequence; a state of None starts from zeros."""
    H, L = config.hidden_size, config.rhn_depth
    skip = state is None and config.first_step == "skip"
    s = np.zeros(H) if state is None else state[0]
    outputs = []
    for t, x in enumerate(x_TC):
        mask, start, layers = at(noise, "update", t), s, []
        for layer in range(L):
            seen = drop(s, config.gal_dropout, at(noise, "gal", t))
            a = np.zeros(2 * H)
            if not (skip and t == 0 and layer == 0):
                a = a + seen @ p[f"weight_s.{layer}"] + p[f"bias_s.{layer}"]
            if layer == 0:
                a = a + x @ p["weight_x"] + p["bias_x"]
            keep = None if mask is None else mask[layer * H : (layer + 1) * H]
            s = naive_highway(a[:H], a[H:], s, config.recurrent_dropout, keep)
            layers.append(s)
        s = zone(start, s, config.zoneout, at(noise, "zoneout", t))
        outputs.append(np.concatenate(layers) if all_layers else s)
    return np.stack(outputs), (s,)


NOISY = dict(rhn_depth=3, recurrent_dropout=0.3, gal_dropout=0.2, zoneout=0.1, h_detach=0.5)


@register_cell("rhn", RHNConfig, naive_rhn, tests=(NOISY, dict(rhn_depth=1, first_step="skip")))
class RHN(Cell):
    """Recurrent highway network; see the module's docstring. State: (s [B, H],).

    Initialisation [Suarez 2017]: every matrix orthogonal with [h, t] as one matrix, biases uniform. A
    negative ``transform_bias`` closes the transform gates at first, as in Zilly et al.'s repository (-2, -4).
    """

    config: RHNConfig
    operation = "highway"
    affine_weights = ("weight_x", "weight_s")
    recurrent_weights = ("weight_s",)

    def __init__(self, config: RHNConfig):
        super().__init__(config)
        C, H, L = config.input_size, config.hidden_size, config.rhn_depth
        self.begins, self.update_size = config.first_step == "skip", L * H
        self.weight_x = nn.Parameter(torch.empty(C, 2 * H))
        self.bias_x = nn.Parameter(torch.empty(2 * H))
        # One tensor per layer: every slicing of a common one would cost a zero-filled gradient of all layers.
        self.weight_s = nn.ParameterList(torch.empty(H, 2 * H) for _ in range(L))
        self.bias_s = nn.ParameterList(torch.empty(2 * H) for _ in range(L))
        orthogonal_(self.weight_x)
        for weight in self.weight_s:
            orthogonal_(weight)
        init_bias_(self.bias_x, C)
        for bias in self.bias_s:
            init_bias_(bias, H)
        self.adjust_initial_values()

    def adjust_initial_values(self):
        shift_transform_(self.bias_s, self.config)

    def input_maps(self):
        return ((self.weight_x, self.bias_x),)

    def begin(self, g, first_TB1):
        # The state is zero here, so leaving out the recurrent map leaves out its bias only.
        return (g[0] - first_TB1 * self.bias_s[0].to(g[0].dtype),)

    def state_matrices(self):
        return {f"weight_s.{layer}": weight for layer, weight in enumerate(self.weight_s)}

    def layers(self, g_t, s_BH, noise_t, matrices=None) -> list[Tensor]:
        """Returns each layer's state in a time step; ``matrices`` as in ``step``."""
        config, states = self.config, []
        matrices = self.weight_s if matrices is None else matrices
        s, gal = s_BH, noise_at(noise_t, "gal")
        for layer, mask in enumerate(layer_masks(noise_t, "update", config.rhn_depth)):
            seen = detach_by_coin(s, noise_at(noise_t, "h_detach")) if layer == 0 else s
            a = affine(dropout(seen, config.gal_dropout, gal), matrices[layer], self.bias_s[layer])
            if layer == 0:
                a = a + g_t[0]
            s = highway(a, s, config.recurrent_dropout, mask)
            states.append(s)
        return states

    def step(self, g_t, state, noise_t, matrices=None):
        (old,) = state
        s = self.layers(g_t, old, noise_t, matrices)[-1]
        s = self.zoned(old, s, noise_t)
        return s, (s,)

    def run_fused(self, g, state, mask_TB, noise, plan):
        return self._run_highway(g, state, mask_TB, noise, plan, trace=False)

    def _run_highway(self, g, state, mask_TB, noise, plan, trace):
        config, gx = self.config, g[0]
        masks = gather_masks(mask_TB, noise, config.gal_dropout, gx, config.rhn_depth)
        numbers = op.HighwayNumbers(1.0 / (1.0 - config.recurrent_dropout), config.zoneout, float(trace))
        biases = op.Biases(torch.stack(list(self.bias_s)))
        y, s = op.highway(gx, state[0], list(self.weight_s), biases, (), masks, numbers, plan)
        return y, (s,)


class RHNTrace(RHN):
    """An RHN that outputs the states of all its layers, [T, B, L H], for use as a hypernetwork.

    Its configuration must have no zoneout, which ``step`` leaves out.
    """

    operation = "highway"

    def step(self, g_t, state, noise_t, matrices=None):
        states = self.layers(g_t, state[0], noise_t, matrices)
        return torch.cat(states, dim=-1), (states[-1],)

    def run_fused(self, g, state, mask_TB, noise, plan):
        return self._run_highway(g, state, mask_TB, noise, plan, trace=True)
