"""HyperRHN with the hypernetwork rolled into the main network (Suarez 2017, section 4).

One state S = [s, s^h] of H + N units goes through the layers of one highway network. In layer l::

    z = hyper_bias + [s^h, s^h, ...]      (repeated, and cut to H)
    P = S W_l,   W_l = [[W^s_l, 0], [0, W^h_l]]
    [h, t] = 1[l = 0] ((x U) * [z, 1] + b_U) + P * [z, 1] + b_l
    S = (1 - t) * S + dropout(t) * h

with h and t each as wide as S. A single product gives the sums of both networks. The zeros of W_l keep them
from mixing linearly; they are not parameters, so no update can change them. The hypernetwork's state is the
hypervector itself, as the paper proposes ("the first h elements of the activation"). It is the state before
the layer; in the HyperRHN it is the state after it. With ``hyper_bias`` 0 every product would be scaled by a
z near zero at first, so 1 is the default. The paper leaves the equations open; these are this project's.

``step`` computes the single product. Because of the zeros, s^h never depends on s, so the fused operation
runs the hypernetwork over the whole sequence first, as for the HyperRHN, and multiplies by the blocks alone.

h-detach cuts the gradient where the previous step's s enters W_0; Gal dropout and zoneout act on s. The
recurrent dropout acts on both networks.

Shapes: T time, B batch, C input, H hidden, N hyper, L depth.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.contract import orthogonal_
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.rhn import NOISY, HighwayConfig, highway, init_bias_, layer_masks, naive_highway
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops import highway as op
from rhhn_fairseq.ops.loop import inner_noise, noise_at
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.regularise import detach_by_coin, dropout
from rhhn_fairseq.ops.sequence import expand_noise, gather_masks, masks_of_positions


@dataclass(frozen=True, kw_only=True)
class RolledHyperRHNConfig(HighwayConfig):
    """Options of the rolled HyperRHN."""

    hyper_size: int = option(128, help="width of the hypernetwork", low=1, high=10**6)
    hyper_bias: float = option(1.0, help="constant added to the hypervectors z")

    def __post_init__(self):
        super().__post_init__()
        self.check_hyper_size(self.hyper_size)


@over_time
def naive_rolled_hyper_rhn(p, config, x, state, noise):
    """The module's equations in numpy for one step; a state of None is zero."""
    H, N, L = config.hidden_size, config.hyper_size, config.rhn_depth
    W = H + N
    S = np.zeros(W) if state is None else np.concatenate(state)
    mask, start = at(noise, "update"), S[:H]
    for layer in range(L):
        z = np.resize(S[H:], H) + config.hyper_bias
        scale = np.concatenate([z, np.ones(N)])
        scale = np.concatenate([scale, scale])
        matrix = np.zeros((W, 2, W))
        matrix[:H, :, :H] = p[f"weight_s.{layer}"].reshape(H, 2, H)
        matrix[H:, :, H:] = p[f"weight_hyper.{layer}"].reshape(N, 2, N)
        seen = np.concatenate([drop(S[:H], config.gal_dropout, at(noise, "gal")), S[H:]])
        a = (seen @ matrix.reshape(W, 2 * W)) * scale + p[f"bias_s.{layer}"]
        if layer == 0:
            a = a + (x @ p["weight_x"]) * scale + p["bias_x"]
        keep = None if mask is None else mask[layer * W : (layer + 1) * W]
        S = naive_highway(a[:W], a[W:], S, config.recurrent_dropout, keep)
    S = np.concatenate([zone(start, S[:H], config.zoneout, at(noise, "zoneout")), S[H:]])
    return S[:H], (S[:H], S[H:])


def starting_states(
    states_TBN: Tensor, first_BN: Tensor, mask_TB: Tensor | None, resets_TB: Tensor | None
) -> Tensor:
    """Returns the state before each step, [T, B, N].

    Args:
        states_TBN: the state after each step; ignored at padding, which leaves the state unchanged.
        first_BN: the state before the first step.
        mask_TB: true at real positions. resets_TB: true where the state starts anew from zeros.
    """
    states = torch.cat((first_BN.unsqueeze(0), states_TBN))
    if mask_TB is None:
        return states[:-1]
    T, B = mask_TB.shape
    steps = torch.arange(1, T + 1, device=mask_TB.device).unsqueeze(1) * mask_TB
    latest = torch.cat((steps.new_zeros(1, B), steps.cummax(0).values[:-1]))
    before = states.gather(0, latest.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
    if resets_TB is None:
        return before
    begun = (torch.arange(1, T + 1, device=mask_TB.device).unsqueeze(1) * resets_TB).cummax(0).values
    return before.masked_fill((begun > latest).unsqueeze(-1), 0.0)


@register_cell(
    "rolled_hyperrhn",
    RolledHyperRHNConfig,
    naive_rolled_hyper_rhn,
    tests=(NOISY | dict(hyper_size=3), dict(hyper_size=2, rhn_depth=1, hyper_bias=0.0)),
)
class RolledHyperRHN(Cell):
    """Rolled HyperRHN; see the module's docstring. State: (s [B, H], s^h [B, N]).

    Initialised as the RHN is: every matrix orthogonal with [h, t] as one matrix, biases uniform.
    """

    config: RolledHyperRHNConfig
    operation = "highway"
    affine_weights = ("weight_x",)
    recurrent_weights = ("weight_s", "weight_hyper")

    def __init__(self, config: RolledHyperRHNConfig):
        super().__init__(config)
        C, H, N, L = config.input_size, config.hidden_size, config.hyper_size, config.rhn_depth
        self.state_sizes, self.update_size = (H, N), L * (H + N)
        self.weight_x = nn.Parameter(torch.empty(C, 2 * (H + N)))
        self.bias_x = nn.Parameter(torch.empty(2 * (H + N)))
        self.weight_s = nn.ParameterList(torch.empty(H, 2 * H) for _ in range(L))
        self.weight_hyper = nn.ParameterList(torch.empty(N, 2 * N) for _ in range(L))
        self.bias_s = nn.ParameterList(torch.empty(2 * (H + N)) for _ in range(L))
        for weight in (self.weight_x, *self.weight_s, *self.weight_hyper):
            orthogonal_(weight)
        for bias, fan_in in ((self.bias_x, C), *((bias, H + N) for bias in self.bias_s)):
            init_bias_(bias, fan_in)

    def input_maps(self):
        return ((self.weight_x, None),)

    def recurrent_matrices(self) -> list[Tensor]:
        """Returns W of every layer, [H + N, 2 (H + N)]."""
        H, N = self.config.hidden_size, self.config.hyper_size
        matrices = []
        for main, inner in zip(self.weight_s, self.weight_hyper, strict=True):
            above = nn.functional.pad(main.view(H, 2, H), (0, N))
            below = nn.functional.pad(inner.view(N, 2, N), (H, 0))
            matrices.append(torch.cat((above, below)).flatten(1))
        return matrices

    def shared_matrices(self):
        return self.recurrent_matrices()

    def run_fused(self, g, state, mask_TB, noise, plan):
        config, (gx,), (s, hyper_s) = self.config, g, state
        H, N, L = config.hidden_size, config.hyper_size, config.rhn_depth
        main_gx, hyper_gx = self._split(gx, 2)
        main_bias, hyper_bias = self._split(torch.stack(list(self.bias_s)), 2)
        main_bias_x, hyper_bias_x = self._split(self.bias_x, 2)
        mask_TB, resets_TB = masks_of_positions(mask_TB, noise)
        main_noise, hyper_noise = dict(noise or {}), inner_noise(noise) or {}
        update = expand_noise(noise, "update", *gx.shape[:2], L * (H + N))
        if update is not None:
            main_noise["update"], hyper_noise["update"] = self._split(update, L)

        keep_scale = 1.0 / (1.0 - config.recurrent_dropout)
        masks = gather_masks(mask_TB, hyper_noise, 0.0, hyper_gx, L)
        trace, hyper_last = op.highway(
            hyper_gx + hyper_bias_x.to(gx.dtype),
            hyper_s,
            list(self.weight_hyper),
            op.Biases(hyper_bias),
            (),
            masks,
            op.HighwayNumbers(keep_scale, trace=1.0),
            plan,
        )
        # A layer reads the hypernetwork's state after the layer before it.
        starts = starting_states(trace[..., -N:], hyper_s.to(gx.dtype), mask_TB, resets_TB)
        before_TBLN = torch.cat((starts, trace[..., :-N]), dim=-1)
        repeats = torch.eye(N, dtype=gx.dtype, device=gx.device).repeat(1, -(-H // N))[:, :H]
        z_shift = main_bias.new_full((L, H), config.hyper_bias)
        if self.taken is not None:
            z = before_TBLN.unflatten(-1, (L, N)) @ repeats + config.hyper_bias
            self.taken.append(z.transpose(1, 2))

        masks = gather_masks(mask_TB, main_noise, config.gal_dropout, main_gx, L)
        y, s = op.highway(
            main_gx,
            s,
            list(self.weight_s),
            op.Biases(main_bias, main_bias_x, z_shift),
            (before_TBLN, repeats.expand(L, N, H)),
            masks,
            op.HighwayNumbers(keep_scale, config.zoneout),
            plan,
        )
        return y, (s, hyper_last)

    def _split(self, both: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Splits a tensor [..., groups (H + N)] into the main network's part and the hypernetwork's."""
        sizes = (self.config.hidden_size, self.config.hyper_size)
        main, hyper = both.unflatten(-1, (groups, -1)).split(sizes, dim=-1)
        return main.flatten(-2).contiguous(), hyper.flatten(-2).contiguous()

    def step(self, g_t, state, noise_t, matrices=None):
        matrices = matrices or self.recurrent_matrices()
        (old, hyper_s), config = state, self.config
        H, N = config.hidden_size, config.hyper_size
        ones, gal = torch.ones_like(hyper_s), noise_at(noise_t, "gal")
        repeats = (1, -(-H // N))
        S, scaling = torch.cat(state, dim=-1), []
        for layer, mask in enumerate(layer_masks(noise_t, "update", config.rhn_depth)):
            z = S[:, H:].repeat(repeats)[:, :H] + config.hyper_bias
            scaling.append(z)
            seen = S
            if layer == 0 or gal is not None:
                s = detach_by_coin(S[:, :H], noise_at(noise_t, "h_detach")) if layer == 0 else S[:, :H]
                seen = torch.cat((dropout(s, config.gal_dropout, gal), S[:, H:]), dim=-1)
            u, bias = affine(seen, matrices[layer]), self.bias_s[layer]
            if layer == 0:
                u, bias = u + g_t[0], bias + self.bias_x
            # The same vector scales h and t.
            scale = torch.cat((z, ones), dim=-1).unsqueeze(1)
            a = (u.unflatten(-1, (2, -1)) * scale).flatten(-2) + bias
            S = highway(a, S, config.recurrent_dropout, mask)
        if self.taken is not None:
            self.taken.append(torch.stack(scaling).unsqueeze(0))
        s, hyper_s = S.split((H, N), dim=-1)
        s = self.zoned(old, s, noise_t)
        return s, (s, hyper_s)
