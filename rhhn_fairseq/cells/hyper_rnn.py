"""HyperRNN (Ha, Dai, Le 2016, equations 2 to 5): a small RNN that generates the weights of a larger one.

Practical form (equation 5), where vectors d scale the columns of fixed matrices (the paper's rows)::

    h' = phi(d_h * (h W_h) + d_x * (x W_x) + b(z_b)),   d_h = z_h W_hz,  d_x = z_x W_xz,  b = z_b W_bz + b_0

Full form (equation 2), where the matrices are combinations of N_z matrices::

    h' = phi(sum_k z_h[k] (h W_h[k]) + sum_k z_x[k] (x W_x[k]) + b(z_b))

The hypernetwork is Elman's network; it reads [x; h] with the previous h, and its state is e::

    z_h = e W_zh + b_zh,   z_x = e W_zx + b_zx,   z_b = e W_zb

The printed equation 3 takes z from the previous e (``hyper_state="previous"``); the implementations take
it from the current one, which is the default. The paper leaves phi open (equation 1); it is tanh by
default, or ReLU. The hypernetwork uses tanh.

z and d are initialised as in HyperLSTM's reference implementation (see ``ScalingVectors``), except that d
starts near 1, so that the cell starts as a plain RNN.

h-detach cuts the gradient where h enters W_h and the hypernetwork; Gal dropout acts in the same places.

Shapes: T time, B batch, C input, H hidden, N hyper, Z embedding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import CellConfig, ContextConfig, option
from rhhn_fairseq.cells.contract import glorot_, orthogonal_, without_context
from rhhn_fairseq.cells.hooks import with_hooks
from rhhn_fairseq.cells.numpy_math import at, drop, over_time, zone
from rhhn_fairseq.cells.registry import register_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cells.simple import ACTIVATIONS, Elman, ElmanConfig
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.matmul.gemm import affine

HYPER_STATES = ("current", "previous")
HYPER_INITS = ("broken_symmetry", "paper")


def scaling_rank(weight_KZH: Tensor) -> float:
    """Returns the mean rank of the maps from z to d, by singular values above 1/1000 of the largest."""
    singular = torch.linalg.svdvals(weight_KZH.detach().float())
    return (singular > 1e-3 * singular[:, :1]).sum(dim=1).float().mean().item()


class ScalingVectors(nn.Module):
    """Maps a hypernetwork's state to the weight scaling vectors (Ha et al. 2016, equations 3 and 5).

    Args:
        hyper_size: N. hyper_embed_size: Z. hidden_size: H.
        gates: how many gates the main cell has, each with its own three z.
        start: the value at which every d starts.
        init: "paper" fills every map from z to d with the same constant, as the reference implementation
            does. Then all Z dimensions stay equal under gradient descent and each map keeps rank 1.
            "broken_symmetry" adds normal noise, so that each d deviates from ``start`` by about 10 %.
    """

    def __init__(self, hyper_size, hyper_embed_size, hidden_size, gates, start, init):
        super().__init__()
        N, Z, H = hyper_size, hyper_embed_size, hidden_size
        self.gates = gates
        self.weight_z = nn.Parameter(torch.zeros(N, 3 * gates * Z))
        self.bias_z = nn.Parameter(torch.ones(2 * gates * Z))
        self.weight_d = nn.Parameter(torch.full((2 * gates, Z, H), start / Z))
        self.weight_b = nn.Parameter(torch.zeros(gates, Z, H))
        self.bias = nn.Parameter(torch.zeros(gates, H))
        nn.init.normal_(self.weight_z.data[:, 2 * gates * Z :], std=0.01)
        if init == "broken_symmetry":
            # In place: on `meta`, torch imports its compiler for any other product.
            self.weight_d.data += torch.randn_like(self.weight_d).mul_(0.1 * start / Z**0.5)

    def forward(self, hyper_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns d for the recurrent matrices, d for the input matrices and b, each [gates, B, H]."""
        z_of_b = self.weight_z.shape[1] - len(self.bias_z)
        bias_z = nn.functional.pad(self.bias_z, (0, z_of_b))
        z = torch.addmm(bias_z, hyper_BN, self.weight_z)
        z_KBZ = z.unflatten(-1, (3 * self.gates, -1)).transpose(0, 1)
        d = torch.bmm(z_KBZ[: 2 * self.gates], self.weight_d)
        b = torch.baddbmm(self.bias.unsqueeze(1), z_KBZ[2 * self.gates :], self.weight_b)
        d_h, d_x = d.chunk(2)
        return d_h, d_x, b


def naive_scaling(p, prefix, e, gate, gates):
    """Returns the vectors d_h, d_x and b of one gate of one sequence, from the hypernetwork's state e."""
    Z = p[prefix + "weight_b"].shape[1]
    z = []
    for kind in range(3):
        columns = slice((kind * gates + gate) * Z, (kind * gates + gate + 1) * Z)
        z.append(e @ p[prefix + "weight_z"][:, columns])
        if kind < 2:
            z[kind] = z[kind] + p[prefix + "bias_z"][columns]
    d_h = z[0] @ p[prefix + "weight_d"][gate]
    d_x = z[1] @ p[prefix + "weight_d"][gates + gate]
    return d_h, d_x, z[2] @ p[prefix + "weight_b"][gate] + p[prefix + "bias"][gate]


@dataclass(frozen=True, kw_only=True)
class HyperRNNConfig(ContextConfig, CellConfig):
    """Options of the HyperRNN."""

    hyper_size: int = option(128, help="width of the hypernetwork", low=1, high=10**6)
    hyper_embed_size: int = option(16, help="width of the embeddings z", low=1, high=10**6)
    hyper_form: str = option(
        "practical",
        help="scale the columns of fixed matrices, or combine hyper_embed_size matrices",
        choices=("practical", "full"),
    )
    hyper_state: str = option(
        "current", help="compute z from this state of the hypernetwork", choices=HYPER_STATES
    )
    hyper_init: str = option(
        "broken_symmetry", help="initialisation of the maps from z to d", choices=HYPER_INITS
    )
    activation: str = option("tanh", help="phi, the activation", choices=("tanh", "relu"))

    def __post_init__(self):
        super().__post_init__()
        if self.hyper_form == "full" and self.hyper_init != "broken_symmetry":
            raise UsageError(
                f"HyperRNN: hyper_init={self.hyper_init!r} has no effect with hyper_form='full', which has "
                "no maps from z to d"
            )


@over_time
def naive_hyper_rnn(p, config, x, state, noise):
    """The module's equations in numpy for one step."""
    h, e = state
    phi = ACTIVATIONS[config.activation][1]
    seen = drop(h, config.gal_dropout, at(noise, "gal"))
    inputs = np.concatenate([x, seen])
    weight = np.concatenate([p["hyper.weight_x"], p["weight_hyper"]])
    e_new = np.tanh(inputs @ weight + e @ p["hyper.weight_h"] + p["hyper.bias"])
    source = e_new if config.hyper_state == "current" else e
    if config.hyper_form == "practical":
        d_h, d_x, b = naive_scaling(p, "scaling.", source, 0, 1)
        a = d_h * (seen @ p["weight_h"]) + d_x * (x[: config.main_input_size] @ p["weight_x"]) + b
    else:
        z_h = source @ p["weight_zh"] + p["bias_zh"]
        z_x = source @ p["weight_zx"] + p["bias_zx"]
        z_b = source @ p["weight_zb"]
        W_h = np.einsum("k,hkj->hj", z_h, p["weight_h"])
        W_x = np.einsum("k,ckj->cj", z_x, p["weight_x"])
        a = seen @ W_h + x[: config.main_input_size] @ W_x + z_b @ p["weight_b"] + p["bias"]
    h, e = zone(h, phi(a), config.zoneout, at(noise, "zoneout")), e_new
    return h, (h, e)


class HyperRNNBase(Cell):
    """The hypernetwork of both forms; subclasses set ``_main``."""

    config: HyperRNNConfig
    affine_weights: tuple[str, ...] = ("weight_x", "weight_h", "weight_hyper")
    recurrent_weights = ("weight_h", "weight_hyper")

    def _main(self, x_BG: Tensor, h_BH: Tensor, e_BN: Tensor) -> Tensor:
        """Returns the main network's sums before phi, [B, H]."""
        raise NotImplementedError(f"{type(self).__name__} has no main network")

    def __init__(self, config: HyperRNNConfig):
        super().__init__(config)
        C, H, N = config.input_size, config.hidden_size, config.hyper_size
        self.state_sizes = (H, N)
        self.hyper = Elman(ElmanConfig(input_size=C, hidden_size=N))
        # The weight of the hypernetwork's other input, h; both are initialised as one matrix.
        both = torch.empty(C + H, N)
        glorot_(both)
        self.hyper.weight_x.data.copy_(both[:C])
        self.weight_hyper = nn.Parameter(both[C:].clone())

    def step(self, g_t, state, noise_t):
        (h, e), (x_main, x_hyper), config = state, g_t, self.config
        seen = self.recurrent_input(h, noise_t)
        hyper_g = affine(seen, self.weight_hyper, x_hyper)
        _, (e_new,) = with_hooks(self.hyper, self.hyper.step, (hyper_g,), (e,), None)
        a = self._main(x_main, seen, e_new if config.hyper_state == "current" else e)
        phi = ACTIVATIONS[config.activation][0]
        new = self.zoned(h, phi(a), noise_t)
        return new, (new, e_new)


class PracticalHyperRNN(HyperRNNBase):
    """HyperRNN of equation 5; see the module's docstring. State: (h [B, H], e [B, N])."""

    def __init__(self, config: HyperRNNConfig):
        super().__init__(config)
        C, H = config.main_input_size, config.hidden_size
        self.scaling = ScalingVectors(
            config.hyper_size, config.hyper_embed_size, H, gates=1, start=1.0, init=config.hyper_init
        )
        self.weight_x = nn.Parameter(torch.empty(C, H))
        self.weight_h = nn.Parameter(torch.empty(H, H))
        glorot_(self.weight_x)
        orthogonal_(self.weight_h)

    def input_maps(self):
        weight_x = without_context(self.weight_x, self.config.hyper_context)
        return (weight_x, None), *self.hyper.input_maps()

    def _main(self, x_BH, h_BH, e_BN):
        d_h, d_x, b = (vector[0] for vector in self.scaling(e_BN))
        if self.taken is not None:
            self.taken.append(d_h[None, None])
        return torch.addcmul(torch.addcmul(b, d_x, x_BH), d_h, affine(h_BH, self.weight_h))

    def diagnostics(self):
        return {"scaling_rank": scaling_rank(self.scaling.weight_d)}


class FullHyperRNN(HyperRNNBase):
    """HyperRNN of equation 2; see the module's docstring. State: (h [B, H], e [B, N]).

    The Z matrices of each kind start as for a plain RNN, divided by sqrt(Z); z starts at 1.
    """

    # The other weights have three dimensions.
    affine_weights = ("weight_hyper",)
    keeps_initial_values = True
    weight_zh: nn.Parameter
    weight_zx: nn.Parameter
    weight_zb: nn.Parameter

    def __init__(self, config: HyperRNNConfig):
        super().__init__(config)
        C, H, N, Z = config.main_input_size, config.hidden_size, config.hyper_size, config.hyper_embed_size
        self.weight_x = nn.Parameter(torch.empty(C, Z, H))
        self.weight_h = nn.Parameter(torch.empty(H, Z, H))
        self.weight_b = nn.Parameter(torch.zeros(Z, H))
        self.bias = nn.Parameter(torch.zeros(H))
        for name in ("zh", "zx", "zb"):
            setattr(self, f"weight_{name}", nn.Parameter(torch.zeros(N, Z)))
        self.bias_zh = nn.Parameter(torch.ones(Z))
        self.bias_zx = nn.Parameter(torch.ones(Z))
        nn.init.normal_(self.weight_zb, std=0.01)
        glorot_(self.weight_x.data.flatten(1), gates=Z)
        orthogonal_(self.weight_h.data.flatten(1), gates=Z)
        for weight in (self.weight_x, self.weight_h):
            weight.data /= Z**0.5

    def input_maps(self):
        # As [C, Z H], one GEMM multiplies by all matrices.
        weight_x = without_context(self.weight_x.flatten(1), self.config.hyper_context)
        return (weight_x, None), *self.hyper.input_maps()

    def _main(self, x_BG, h_BH, e_BN):
        Z = self.config.hyper_embed_size
        z_h = torch.addmm(self.bias_zh, e_BN, self.weight_zh)
        z_x = torch.addmm(self.bias_zx, e_BN, self.weight_zx)
        if self.taken is not None:
            self.taken.append(z_h[None, None])
        h_BZH = affine(h_BH, self.weight_h.flatten(1)).unflatten(-1, (Z, -1))
        x_BZH = x_BG.unflatten(-1, (Z, -1))
        mixed = torch.einsum("bz,bzh->bh", z_h, h_BZH) + torch.einsum("bz,bzh->bh", z_x, x_BZH)
        return mixed + torch.addmm(self.bias, e_BN @ self.weight_zb, self.weight_b)


NOISY = dict(hyper_size=3, hyper_embed_size=2, gal_dropout=0.2, zoneout=0.1, h_detach=0.5)


@register_cell(
    "hyperrnn",
    HyperRNNConfig,
    naive_hyper_rnn,
    tests=(
        NOISY,
        dict(hyper_size=3, hyper_embed_size=2, hyper_state="previous", hyper_init="paper"),
        dict(hyper_size=3, hyper_embed_size=2, activation="relu", hyper_context=2),
        NOISY | dict(hyper_form="full", hyper_context=1),
        dict(hyper_size=3, hyper_embed_size=2, hyper_form="full", hyper_state="previous"),
    ),
)
def build_hyper_rnn(config: HyperRNNConfig) -> HyperRNNBase:
    """Returns the HyperRNN of ``config.hyper_form``."""
    return PracticalHyperRNN(config) if config.hyper_form == "practical" else FullHyperRNN(config)
