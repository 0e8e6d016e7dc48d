"""Recurrent highway hypernetwork, HyperRHN (Suarez 2017, equations 6 and 7).

The hypernetwork is a plain RHN of width N and the same depth. It reads x and its own state only, never
the main network's, so its whole sequence runs before the main one (``prepare``). Its layer l gives the
hypervector of the main layer l::

    z_l = s^h_l M_l + m_l + hyper_bias,   z = [z_l, z_l]
    [h, t] = 1[l = 0] ((x U) * z + b_U) + (s W_l) * z + b_l

and then as in the RHN. ``hyper_bias`` is a constant, zero in the paper. With 1 the cell starts near a plain
RHN; with 0 every product is scaled by a small z at first, and hardly any signal passes through a deep stack
until z has grown in training. The biases are not scaled, as in the paper's repository. ``first_step="skip"``
omits the first step's b_0 in both networks, as described for the RHN.

``hyper_rank`` d > 1 scales the recurrent matrices by a sum of d outer products (equation 8), the first of
which is the scaling above::

    s W_l -> s (W_l * (1 z^T + a_2 b_2^T + ... + a_d b_d^T)),   [a_2 .. a_d, b_2 .. b_d] = s^h_l R_l + r_l

Each b_i, like z, is the same for h and t. The input map is scaled by the first term alone.

h-detach cuts the gradient where the main state of the previous step enters W_0; Gal dropout and zoneout
act on the main state as well. The recurrent dropout acts on both networks.

Shapes: T time, B batch, C input, H hidden, N hyper, L depth.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import ContextConfig, option
from rhhn_fairseq.cells.contract import orthogonal_, without_context
from rhhn_fairseq.cells.hooks import with_hooks
from rhhn_fairseq.cells.numpy_math import at, drop, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.rhn import (
    NOISY,
    RHNConfig,
    RHNTrace,
    highway,
    init_bias_,
    layer_masks,
    naive_highway,
    naive_rhn,
    shift_transform_,
)
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops import backends
from rhhn_fairseq.ops import highway as op
from rhhn_fairseq.ops.loop import inner_noise, noise_at
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.matmul.rank_scaling import rank_scaled, scaling_matrices
from rhhn_fairseq.ops.regularise import detach_by_coin, draw_mask, dropout
from rhhn_fairseq.ops.sequence import gather_masks


@dataclass(frozen=True, kw_only=True)
class HyperRHNConfig(ContextConfig, RHNConfig):
    """Options of the HyperRHN."""

    hyper_size: int = option(128, help="width of the hypernetwork", low=1, high=10**6)
    hyper_bias: float = option(0.0, help="constant added to the hypervectors z")
    hyper_rank: int = option(1, help="outer products that scale a recurrent matrix", low=1)

    def __post_init__(self):
        super().__post_init__()
        self.check_hyper_size(self.hyper_size)

    def hyper(self) -> RHNConfig:
        """Returns the configuration of the hypernetwork."""
        return RHNConfig(
            input_size=self.input_size,
            hidden_size=self.hyper_size,
            rhn_depth=self.rhn_depth,
            recurrent_dropout=self.recurrent_dropout,
            first_step=self.first_step,
        )


def naive_hyper_rhn(p, config, x_TC, state, noise):
    """The module's equations in numpy for one sequence; a state of None starts from zeros."""
    H, N, L = config.hidden_size, config.hyper_size, config.rhn_depth
    inner = {name.removeprefix("hyper."): value for name, value in p.items() if name.startswith("hyper.")}
    inner_noise = noise
    if noise is not None:
        inner_noise = {"update": noise["hyper_update"]} if "hyper_update" in noise else {}
    hyper_state = None if state is None else (state[1],)
    trace, (hyper_s,) = naive_rhn(inner, config.hyper(), x_TC, hyper_state, inner_noise, all_layers=True)
    skip = state is None and config.first_step == "skip"
    s = np.zeros(H) if state is None else state[0]
    outputs = []
    for t, x in enumerate(x_TC):
        mask, start = at(noise, "update", t), s
        for layer in range(L):
            z = trace[t, layer * N : (layer + 1) * N] @ p["weight_z"][layer] + p["bias_z"][layer]
            z = z + config.hyper_bias
            z = np.concatenate([z, z])
            seen = drop(s, config.gal_dropout, at(noise, "gal", t))
            a = np.zeros(2 * H)
            if not (skip and t == 0 and layer == 0):
                scale = np.outer(np.ones(H), z)
                if config.hyper_rank > 1:
                    vectors = trace[t, layer * N : (layer + 1) * N] @ p["weight_rank"][layer]
                    left, right = np.split((vectors + p["bias_rank"][layer]).reshape(-1, H), 2)
                    scale = scale + left.T @ np.concatenate([right, right], axis=1)
                a = a + seen @ (p[f"weight_s.{layer}"] * scale) + p[f"bias_s.{layer}"]
            if layer == 0:
                a = a + (x[: config.main_input_size] @ p["weight_x"]) * z + p["bias_x"]
            keep = None if mask is None else mask[layer * H : (layer + 1) * H]
            s = naive_highway(a[:H], a[H:], s, config.recurrent_dropout, keep)
        s = zone(start, s, config.zoneout, at(noise, "zoneout", t))
        outputs.append(s)
    return np.stack(outputs), (s, hyper_s)


@register_cell(
    "hyperrhn",
    HyperRHNConfig,
    naive_hyper_rhn,
    tests=(
        NOISY | dict(hyper_size=3, rhn_depth=2),
        dict(hyper_size=2, rhn_depth=1, first_step="skip", hyper_bias=1.0, hyper_context=1),
        dict(hyper_size=2, rhn_depth=2, hyper_rank=3, recurrent_dropout=0.3, gal_dropout=0.2, h_detach=0.5),
    ),
)
class HyperRHN(Cell):
    """HyperRHN; see the module's docstring. State: (s [B, H], s^h [B, N]).

    Initialised as the RHN is: every matrix orthogonal, every bias uniform, so z does not start at zero.
    """

    config: HyperRHNConfig
    operation: str | None = "highway"
    prepared_states = 1
    affine_weights: tuple[str, ...] = ("weight_x", "weight_s")
    recurrent_weights = ("weight_s",)

    def __init__(self, config: HyperRHNConfig):
        super().__init__(config)
        C, H, N, L = config.main_input_size, config.hidden_size, config.hyper_size, config.rhn_depth
        self.state_sizes = (H, N)
        self.begins, self.update_size = config.first_step == "skip", L * H
        self.hyper = RHNTrace(config.hyper())
        self.weight_z = nn.Parameter(torch.empty(L, N, H))
        self.bias_z = nn.Parameter(torch.empty(L, H))
        self.weight_x = nn.Parameter(torch.empty(C, 2 * H))
        self.bias_x = nn.Parameter(torch.empty(2 * H))
        self.weight_s = nn.ParameterList(torch.empty(H, 2 * H) for _ in range(L))
        self.bias_s = nn.ParameterList(torch.empty(2 * H) for _ in range(L))
        for weight in (self.weight_x, *self.weight_s, *self.weight_z):
            orthogonal_(weight)
        for bias, fan_in in ((self.bias_x, C), *((b, H) for b in self.bias_s), (self.bias_z, N)):
            init_bias_(bias, fan_in)
        self.adjust_initial_values()
        if config.hyper_rank > 1:
            self.affine_weights = tuple(name for name in self.affine_weights if name != "weight_s")
            width = 2 * (config.hyper_rank - 1) * H
            self.weight_rank = nn.Parameter(torch.empty(L, N, width))
            self.bias_rank = nn.Parameter(torch.empty(L, width))
            for weight in self.weight_rank:
                orthogonal_(weight)
            init_bias_(self.bias_rank, N)

    def adjust_initial_values(self):
        shift_transform_(self.bias_s, self.config)

    def sample_noise(self, T, B, device=None, generator=None):
        noise, config = super().sample_noise(T, B, device, generator), self.config
        if config.recurrent_dropout:
            shape = (T, B, config.rhn_depth * config.hyper_size)
            noise["hyper_update"] = draw_mask(shape, 1.0 - config.recurrent_dropout, device, generator)
        return noise

    def input_maps(self):
        weight_x = without_context(self.weight_x, self.config.hyper_context)
        return (weight_x, None), *self.hyper.input_maps()

    def begin(self, g, first_TB1):
        return (g[0], *self.hyper.begin(g[1:], first_TB1), first_TB1)

    def prepare(self, g, state, mask_TB, noise, plan):
        """Runs the hypernetwork: g becomes (x U, its states after every layer [T, B, L N], first step)."""
        x_TBG, hyper_g, *first = g
        trace, (hyper_s,) = with_hooks(
            self.hyper, self.hyper.run, (hyper_g,), (state[1],), mask_TB, inner_noise(noise), plan
        )
        if self.taken is not None:
            by_layer = trace.unflatten(-1, (self.config.rhn_depth, -1)).unbind(2)
            pairs = zip(by_layer, self.weight_z, self.z_shift(), strict=True)
            self.taken.append(torch.stack([s @ weight + shift for s, weight, shift in pairs], dim=1))
        return (x_TBG, trace, *first), (state[0], hyper_s)

    def plan_of_steps(self, x_TBC):
        return backends.select(self.hyper.request(x_TBC[:1]))

    def run_fused(self, g, state, mask_TB, noise, plan):
        config, (gx, trace, *first) = self.config, g
        first_TB1 = first[0] if first else None
        masks = gather_masks(mask_TB, noise, config.gal_dropout, gx, config.rhn_depth, first_TB1)
        numbers = op.HighwayNumbers(1.0 / (1.0 - config.recurrent_dropout), config.zoneout)
        biases = op.Biases(torch.stack(list(self.bias_s)), self.bias_x, self.z_shift())
        hyper: tuple[Tensor, Tensor] = (trace, self.weight_z)
        if config.hyper_rank > 1:
            first_TBN = trace[..., : config.hyper_size]
            z = first_TBN @ self.weight_z[0].to(gx.dtype) + self.z_shift()[0].to(gx.dtype)
            gx = _scale_halves(gx, z) + self.bias_x.to(gx.dtype)
            biases, hyper = op.Biases(biases.bias), (trace, self._map_to_vectors())
        y, s = op.highway(gx, state[0], list(self.weight_s), biases, hyper, masks, numbers, plan)
        return y, (s, state[1])

    def _map_to_vectors(self) -> Tensor:
        """Returns the maps from a layer's s^h to z, b_2 .. b_d, a_2 .. a_d, bias last, [L, N + 1, V H]."""
        weight_a, weight_b = self.weight_rank.chunk(2, dim=-1)
        bias_a, bias_b = self.bias_rank.chunk(2, dim=-1)
        weight = torch.cat((self.weight_z, weight_b, weight_a), dim=-1)
        bias = torch.cat((self.z_shift(), bias_b, bias_a), dim=-1)
        return torch.cat((weight, bias.unsqueeze(1)), dim=1)

    def z_shift(self):
        """Returns the term that is added to the product with ``weight_z``, [L, H]."""
        return self.bias_z + self.config.hyper_bias

    def scaling_matrices(self, hyper_BN: Tensor, layer: int) -> Tensor:
        """Returns the scale of a layer's matrix, [B, H, 2, H], for ``hyper_rank`` > 1, from its s^h."""
        first = hyper_BN @ self.weight_z[layer] + self.z_shift()[layer]
        rank = self.weight_rank[layer], self.bias_rank[layer]
        scale = scaling_matrices(first, hyper_BN, *rank, self.config.hidden_size)
        return scale.unsqueeze(2).expand(-1, -1, 2, -1)

    def layers(self, g_t, s_BH, noise_t) -> list[Tensor]:
        """Returns each layer's state in a time step."""
        config, states = self.config, []
        x, trace, *first = g_t
        by_layer = trace.unflatten(-1, (config.rhn_depth, -1)).transpose(0, 1)
        z = torch.baddbmm(self.z_shift().unsqueeze(1), by_layer, self.weight_z).unbind(0)
        s, gal = s_BH, noise_at(noise_t, "gal")
        for layer, mask in enumerate(layer_masks(noise_t, "update", config.rhn_depth)):
            seen = detach_by_coin(s, noise_at(noise_t, "h_detach")) if layer == 0 else s
            seen = dropout(seen, config.gal_dropout, gal)
            bias = self.bias_s[layer]
            if layer == 0:
                bias = self.bias_x + (bias * ~first[0] if first else bias)
            if config.hyper_rank > 1:
                hyper = by_layer[layer], self.weight_rank[layer], self.bias_rank[layer]
                a = rank_scaled(seen, self.weight_s[layer], z[layer], *hyper)
                a = a + bias if layer else a + _scale_halves(x, z[0]) + bias
            else:
                u = affine(seen, self.weight_s[layer])
                a = _scale_halves(u if layer else u + x, z[layer]) + bias
            s = highway(a, s, config.recurrent_dropout, mask)
            states.append(s)
        return states

    def step(self, g_t, state, noise_t):
        old, hyper_s = state
        s = self.layers(g_t, old, noise_t)[-1]
        s = self.zoned(old, s, noise_t)
        return s, (s, hyper_s)


def _scale_halves(u_BG: Tensor, z_BH: Tensor) -> Tensor:
    """Returns u with both halves [h, t] scaled by the same z."""
    return (u_BG.unflatten(-1, (2, -1)) * z_BH.unsqueeze(-2)).flatten(-2)
