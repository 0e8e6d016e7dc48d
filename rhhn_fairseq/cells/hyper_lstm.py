"""HyperLSTM and LN HyperLSTM (Ha, Dai, Le 2016, section 3.1; reference implementation: supercell).

The hypernetwork is an LSTM of N units that reads [x; h] with the previous h; its state is (e, k). Each of
the four gates has its own embeddings z_h, z_x and z_b, computed from e, which give its scaling vectors::

    a_gate = d_h * (h W_h) + d_x * (x W_x) + b,   d_h = z_h W_hz,  d_x = z_x W_xz,  b = z_b W_bz + b_0

followed by the LSTM's equations. Gate order i, f, g, o in every weight's columns.

The printed equation 3 takes z from the previous e (``hyper_state="previous"``); supercell and the other
implementations take it from the current one, which is the default.

With layer normalisation, in both LSTMs, each gate's sum is normalised before the forget bias is added, and
c inside the output's tanh. Recurrent dropout acts on the main cell's update only. h-detach cuts the gradient
where h enters W_h and the hypernetwork; Gal dropout acts in the same places.

``hyper_rank`` d > 1 scales W_h by a sum of d outer products (Suarez 2017, equation 8), the first of which is
the scaling above::

    h W_h -> h (W_h * (1 d_h^T + a_2 b_2^T + ... + a_d b_d^T)),   [a_2 .. a_d, b_2 .. b_d] = (e R_z) R + r

Here d_h and every b_i have a block for each gate, every a_i is the same for all gates, and e R_z is one more
embedding of width Z. At the start every a_i has random signs and every b_i is zero, so the cell starts as the
one of rank 1. The input map is scaled by d_x alone.

Initialisation: recurrent matrices orthogonal for each gate, input matrices Glorot uniform for each gate;
z, d and b as ``ScalingVectors`` describes, every d near 0.1.

Shapes: T time, B batch, C input, H hidden, N hyper, Z embedding, G = 4 H.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import ContextConfig, option
from rhhn_fairseq.cells.contract import glorot_, orthogonal_, without_context
from rhhn_fairseq.cells.hooks import with_hooks
from rhhn_fairseq.cells.hyper_rnn import (
    HYPER_INITS,
    HYPER_STATES,
    ScalingVectors,
    naive_scaling,
    scaling_rank,
)
from rhhn_fairseq.cells.lstm import (
    LSTM,
    NOISY,
    GatedCell,
    LSTMConfig,
    naive_lstm,
    naive_update,
)
from rhhn_fairseq.cells.numpy_math import at, drop, over_time
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.ops import hyper_lstm as op
from rhhn_fairseq.ops.matmul.gemm import affine
from rhhn_fairseq.ops.matmul.rank_scaling import rank_scaled, scaling_matrices
from rhhn_fairseq.ops.sequence import gather_masks


@dataclass(frozen=True, kw_only=True)
class HyperLSTMConfig(ContextConfig, LSTMConfig):
    """Options of the HyperLSTM."""

    hyper_size: int = option(128, help="width of the hypernetwork", low=1, high=10**6)
    hyper_embed_size: int = option(4, help="width of the embeddings z", low=1, high=10**6)
    hyper_state: str = option(
        "current", help="compute z from this state of the hypernetwork", choices=HYPER_STATES
    )
    hyper_init: str = option(
        "broken_symmetry", help="initialisation of the maps from z to d", choices=HYPER_INITS
    )
    hyper_rank: int = option(1, help="outer products that scale a recurrent matrix", low=1)

    def hyper(self) -> LSTMConfig:
        """Returns the configuration of the hypernetwork; its second input, h, has a separate weight."""
        return LSTMConfig(
            input_size=self.input_size,
            hidden_size=self.hyper_size,
            forget_bias=self.forget_bias,
            layer_norm=self.layer_norm,
            norm_epsilon=self.norm_epsilon,
        )


@over_time
def naive_hyper_lstm(p, config, x, state, noise):
    """The module's equations in numpy, one gate at a time, for one step."""
    h, c, e, k = state
    H = config.hidden_size
    inner = {name.removeprefix("hyper."): value for name, value in p.items() if name.startswith("hyper.")}
    inner["weight_x"] = np.concatenate([p["hyper.weight_x"], p["weight_hyper"]])
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    inputs = np.concatenate([x, seen])[None]
    _, (e_new, k) = naive_lstm(inner, config.hyper(), inputs, (e, k), None)
    source = e_new if config.hyper_state == "current" else e
    sums = []
    terms = config.hyper_rank - 1
    if terms:
        vectors = (source @ p["weight_rank_z"]) @ p["weight_rank"] + p["bias_rank"]
        left, right = vectors[: terms * H].reshape(terms, H), vectors[terms * H :].reshape(terms, 4, H)
    for n in range(4):
        columns = slice(n * H, (n + 1) * H)
        d_h, d_x, b = naive_scaling(p, "scaling.", source, n, 4)
        scale = np.outer(np.ones(H), d_h)
        for term in range(terms):
            scale = scale + np.outer(left[term], right[term, n])
        read = x[: config.main_input_size] @ p["weight_x"][:, columns]
        sums.append(seen @ (p["weight_h"][:, columns] * scale) + d_x * read + b)
    h, c = naive_update(sums, h, c, config, noise, p if config.layer_norm else None)
    return h, (h, c, e_new, k)


SMALL = dict(hyper_size=3, hyper_embed_size=2)
PRINTED = SMALL | dict(hyper_state="previous", hyper_init="paper")
RANK_3 = SMALL | NOISY | dict(hyper_rank=3, hyper_context=1)


@register_cell("hyperlstm", HyperLSTMConfig, naive_hyper_lstm, tests=(SMALL | NOISY, PRINTED, RANK_3))
@register_cell(
    "ln_hyperlstm",
    HyperLSTMConfig,
    naive_hyper_lstm,
    tests=(
        SMALL | NOISY | dict(norm_epsilon=0.1),
        PRINTED,
        SMALL | dict(hyper_context=2),
        SMALL | dict(hyper_rank=2),
    ),
    layer_norm=True,
)
class HyperLSTM(GatedCell):
    """HyperLSTM; see the module's docstring. State: (h [B, H], c [B, H], e [B, N], k [B, N])."""

    config: HyperLSTMConfig
    operation: str | None = "hyper_lstm"
    affine_weights: tuple[str, ...] = ("weight_x", "weight_h", "weight_hyper")
    recurrent_weights = ("weight_h", "weight_hyper")

    def __init__(self, config: HyperLSTMConfig):
        super().__init__(config)
        C, H, N = config.input_size, config.hidden_size, config.hyper_size
        self.state_sizes = (H, H, N, N)
        self.hyper = LSTM(config.hyper())
        # The hypernetwork's weight of [x; h] is two parameters: slicing one would cost a zero-filled
        # gradient of the whole at every step.
        both = torch.empty(C + H, 4 * N)
        glorot_(both, gates=4)
        self.hyper.weight_x.data.copy_(both[:C])
        self.weight_hyper = nn.Parameter(both[C:].clone())
        self.scaling = ScalingVectors(
            N, config.hyper_embed_size, H, gates=4, start=0.1, init=config.hyper_init
        )
        self.weight_x = nn.Parameter(torch.empty(config.main_input_size, 4 * H))
        self.weight_h = nn.Parameter(torch.empty(H, 4 * H))
        glorot_(self.weight_x, gates=4)
        orthogonal_(self.weight_h, gates=4)
        if config.layer_norm:
            self.add_norm()
        if config.hyper_rank > 1:
            self.affine_weights = tuple(name for name in self.affine_weights if name != "weight_h")
            self._add_outer_products(config.hyper_rank - 1)
            # The loop over steps runs it on every device.
            self.operation = None

    def _add_outer_products(self, terms: int) -> None:
        H, Z = self.config.hidden_size, self.config.hyper_embed_size
        self.weight_rank_z = nn.Parameter(torch.empty(self.config.hyper_size, Z))
        self.weight_rank = nn.Parameter(torch.zeros(Z, terms * 5 * H))
        self.bias_rank = nn.Parameter(torch.zeros(terms * 5 * H))
        nn.init.normal_(self.weight_rank_z, std=0.01)
        nn.init.normal_(self.weight_rank.data[:, : terms * H], std=Z**-0.5)
        self.bias_rank.data[: terms * H] = torch.randint(0, 2, (terms * H,)) * 2.0 - 1.0

    def input_maps(self):
        weight_x = without_context(self.weight_x, self.config.hyper_context)
        return (weight_x, None), *self.hyper.input_maps()

    def step(self, g_t, state, noise_t):
        (h, c, e, k), (x_main, x_hyper), config = state, g_t, self.config
        seen = self.recurrent_input(h, noise_t)
        hyper_g = affine(seen, self.weight_hyper, x_hyper)
        _, (e_new, k_new) = with_hooks(self.hyper, self.hyper.step, (hyper_g,), (e, k), None)
        source = e_new if config.hyper_state == "current" else e
        d_h, d_x, b = self.scaling(source)
        if self.taken is not None:
            self.taken.append(d_h.unsqueeze(0))
        a = torch.addcmul(b, d_x, _by_gate(x_main))
        if config.hyper_rank > 1:
            z = source @ self.weight_rank_z
            first = d_h.transpose(0, 1).flatten(1)
            a = a + _by_gate(rank_scaled(seen, self.weight_h, first, z, self.weight_rank, self.bias_rank))
        else:
            a = torch.addcmul(a, d_h, _by_gate(affine(seen, self.weight_h)))
        normalise_c = None
        if config.layer_norm:
            a = nn.functional.layer_norm(a, a.shape[-1:], eps=config.norm_epsilon)
            gain, shift = (p.view(4, 1, -1) for p in (self.gate_norm_weight, self.gate_norm_bias))
            a = torch.addcmul(shift, a, gain)
            normalise_c = self.normalise_c
        y, main = self.update(a, h, c, noise_t, normalise_c)
        return y, (*main, e_new, k_new)

    def scaling_matrices(self, e_BN: Tensor) -> Tensor:
        """Returns the scale of W_h, [B, H, 4, H], for ``hyper_rank`` > 1, from the hypernetwork's state."""
        first = self.scaling(e_BN)[0].transpose(0, 1).flatten(1)
        rank = e_BN @ self.weight_rank_z, self.weight_rank, self.bias_rank
        return scaling_matrices(first, *rank, self.config.hidden_size).unflatten(-1, (4, -1))

    def run_fused(self, g, state, mask_TB, noise, plan):
        config, scaling = self.config, self.scaling
        weights = op.Weights(
            self.weight_h,
            self.weight_hyper,
            self.hyper.weight_h,
            scaling.weight_z,
            nn.functional.pad(scaling.bias_z, (0, scaling.weight_z.shape[1] - len(scaling.bias_z))),
            torch.cat([scaling.weight_d, scaling.weight_b]),
            scaling.bias,
        )
        norms = self.norm() + self.hyper.norm()
        masks = gather_masks(mask_TB, noise, config.gal_dropout, g[0])
        previous = config.hyper_state == "previous"
        y, state, e = op.hyper_lstm(g, state, weights, norms, masks, self.numbers(), previous, plan)
        if self.taken is not None:
            self.taken.append(scaling(e.flatten(0, 1))[0].unflatten(1, e.shape[:2]).transpose(0, 1))
        return y, state

    def diagnostics(self):
        return {"scaling_rank": scaling_rank(self.scaling.weight_d)}


def _by_gate(u_BG: Tensor) -> Tensor:
    """Reshapes sums [B, 4 H] to [4, B, H], one block per gate."""
    return u_BG.unflatten(-1, (4, -1)).transpose(0, 1)
