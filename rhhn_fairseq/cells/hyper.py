"""A recurrent cell scaled by another (Suarez 2017, section 2.2: the hypernetwork is "an arbitrary recurrent
architecture").

The main cell is one with ``state_matrices`` (``scalable_cells``): an LSTM, GRU, RHN, Elman's network or one
of their variants. The hypernetwork is any cell but ``hyper`` itself; its output is e. It reads x, or [x; h]
with the main network's output h of the previous step. It scales the products of every main-cell matrix that a
state enters (``Cell.state_matrices``) and, with ``hyper_scales="all"``, of every map of the input::

    s W_j -> d_j * (s W_j),   x W_i -> d_i * (x W_i)

and then the main cell's own equations follow. ``hyper_map`` says how d is computed from e:

- ``embedding`` (Ha et al. 2016, equations 3 and 5): each gate of each matrix has its own embedding
  z = e W_z + b_z, and d = z W_d. The biases of the input maps also get a term, b + (e W_zb) W_b.
- ``direct`` (Suarez 2017, equation 4): d_j = e M_j + m_j, as wide as the state, the same for all gates of a
  matrix. The input maps use the d of the first matrix.

With ``hyper_output="layers"`` the hypernetwork is an RHN as deep as the main network, and its state after
layer l scales the matrices of layer l, as in the HyperRHN.

Thus ``hyperlstm`` is an ``lstm`` scaled by an ``lstm``, ``ln_hyperlstm`` an ``ln_lstm`` scaled by an
``ln_lstm``, both with ``hyper_start=0.1``; ``hyperrhn`` is an ``rhn`` scaled by an ``rhn`` with
``hyper_input="x"``, ``hyper_map="direct"``, ``hyper_output="layers"`` and ``hyper_start=0.0``.

The regularisers are the main cell's and act as they do there; h-detach and Gal dropout also act on the h
that the hypernetwork reads. ``hyper_dropout`` is the hypernetwork's own recurrent dropout.

Shapes: T time, B batch, C input, H hidden, N hyper, Z embedding, S scaled gates, G columns of a matrix.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import CellConfig, ContextConfig, StateConfig, option
from rhhn_fairseq.cells.contract import apply_maps, without_context
from rhhn_fairseq.cells.hooks import with_hooks
from rhhn_fairseq.cells.hyper_rnn import scaling_rank
from rhhn_fairseq.cells.lstm import NOISY, GatedConfig
from rhhn_fairseq.cells.numpy_math import at, drop
from rhhn_fairseq.cells.registry import CELLS, cell_options, register_cell
from rhhn_fairseq.cells.rhn import RHNConfig, RHNTrace, init_bias_, naive_rhn
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends
from rhhn_fairseq.ops.loop import inner_noise
from rhhn_fairseq.ops.matmul.gemm import ScaledWeight

# Options of the main network that its hypernetwork shares, if both cells have them.
COMMON = {"rhn_depth", "first_step", "forget_bias"}


def scalable_cells() -> list[str]:
    """Names of the cells with matrices that a hypernetwork can scale."""
    return sorted(
        name
        for name, entry in CELLS.items()
        if hasattr(entry.cell, "state_matrices") and entry.cell.state_matrices is not Cell.state_matrices
    )


@dataclass(frozen=True, kw_only=True)
class HyperConfig(ContextConfig, RHNConfig, GatedConfig):
    """Options of a scaled cell: those of the main network, and those of its scaling."""

    main_cell: str = option("lstm", help="the cell whose weights are scaled")
    hyper_cell: str = option("lstm", help="the cell that is the hypernetwork")
    hyper_size: int = option(128, help="width of the hypernetwork", low=1, high=10**6)
    hyper_embed_size: int = option(4, help="width of the embeddings z", low=1, high=10**6)
    hyper_input: str = option(
        "xh",
        help="what the hypernetwork reads: x, or x and the main network's previous output",
        choices=("x", "xh"),
    )
    hyper_map: str = option(
        "embedding",
        help="how its output gives scaling vectors: embeddings of each gate, or one map per matrix",
        choices=("embedding", "direct"),
    )
    hyper_scales: str = option(
        "all", help="scale all products, or those of the state alone", choices=("all", "recurrent")
    )
    hyper_output: str = option(
        "last",
        help="states that give scaling vectors: the last layer's, or each layer's for the same layer",
        choices=("last", "layers"),
    )
    hyper_start: float = option(1.0, help="value near which the scaling vectors start")
    hyper_dropout: float = option(0.0, help="recurrent dropout of the hypernetwork", low=0, below=1)

    def __post_init__(self):
        super().__post_init__()
        # A Mogrifier LSTM's rounds gate x itself, to which no product with h can be added.
        without = {"hyper", "mogrifier_lstm"} if self.hyper_input == "xh" else {"hyper"}
        scalable, others = scalable_cells(), sorted(CELLS.keys() - without)
        kinds = ("a cell whose matrices can be scaled", "a cell without a hypernetwork of choice")
        for name, kind, valid in zip(("main_cell", "hyper_cell"), kinds, (scalable, others), strict=True):
            if getattr(self, name) not in valid:
                raise UsageError(
                    f"Hyper: {name}={getattr(self, name)!r} is not {kind}, choose from {', '.join(valid)}"
                )
        main, hyper = cell_options(self.main_cell), cell_options(self.hyper_cell)
        for spec in (*fields(RHNConfig), *fields(GatedConfig)):
            value = getattr(self, spec.name)
            # Sizes, the depth of highway networks among them, may be given for any cell.
            known = {"input_size", "hidden_size", "rhn_depth", *main, *(COMMON & hyper.keys())}
            if spec.name not in known and value != spec.default:
                raise UsageError(
                    f"Hyper: {spec.name}={value!r} is not an option of the main cell {self.main_cell}"
                )
        if self.hyper_dropout and "recurrent_dropout" not in hyper:
            raise UsageError(
                f"Hyper: hyper_dropout={self.hyper_dropout!r}, but the cell {self.hyper_cell} has no "
                "recurrent dropout"
            )
        if self.hyper_output == "layers" and (self.hyper_cell != "rhn" or "rhn_depth" not in main):
            raise UsageError(
                f"Hyper: hyper_output='layers' with hyper_cell={self.hyper_cell!r} and main_cell="
                f"{self.main_cell!r}, expected hyper_cell rhn and main_cell rhn or grid_rhn"
            )

    def main(self) -> CellConfig:
        """Returns the configuration of the main network, with its own defaults for what is default here."""
        entry, defaults, given = CELLS[self.main_cell], _defaults(type(self)), {}
        for spec in fields(entry.config):
            value = getattr(self, spec.name, None)
            if spec.name in defaults and value != defaults[spec.name] and spec.name != "recompute_steps":
                given[spec.name] = value
        config = entry.config(**given | entry.defaults | {"input_size": self.main_input_size})
        assert isinstance(config, CellConfig)
        return config

    def hyper(self) -> StateConfig:
        """Returns the configuration of the hypernetwork; its second input, h, has separate weights.

        If the hypernetwork has a hypernetwork itself, both have the same width.
        """
        entry, known = CELLS[self.hyper_cell], cell_options(self.hyper_cell)
        names, defaults = [name for name in COMMON if name in known], _defaults(type(self))
        given = {name: getattr(self, name) for name in names if getattr(self, name) != defaults[name]}
        if "hyper_size" in known:
            given["hyper_size"] = self.hyper_size
        if self.hyper_dropout:
            given["recurrent_dropout"] = self.hyper_dropout
        return entry.config(input_size=self.input_size, hidden_size=self.hyper_size, **given | entry.defaults)


def _defaults(config: type[HyperConfig]) -> dict[str, object]:
    """Returns the defaults of a configuration; those of required fields equal no value."""
    return {spec.name: spec.default for spec in fields(config)}


class EmbeddedScaling(nn.Module):
    """Scaling vectors from embeddings; see the module's docstring. Every d starts near ``hyper_start``.

    Args:
        scaled: S, number of gates with a d. shifted: number of gates whose bias gets a term.
    """

    def __init__(self, config: HyperConfig, scaled: int, shifted: int):
        super().__init__()
        N, Z, H = config.hyper_size, config.hyper_embed_size, config.hidden_size
        self.scaled = scaled
        self.weight_z = nn.Parameter(torch.zeros(N, (scaled + shifted) * Z))
        self.bias_z = nn.Parameter(torch.ones(scaled * Z))
        # In place: on `meta`, torch imports its compiler for any other product.
        spread = 0.1 * (config.hyper_start or 1.0) / Z**0.5
        self.weight_d = nn.Parameter(torch.randn(scaled, Z, H).mul_(spread))
        self.weight_d.data += config.hyper_start / Z
        if shifted:
            self.weight_b = nn.Parameter(torch.zeros(shifted, Z, H))
            nn.init.normal_(self.weight_z.data[:, scaled * Z :], std=0.01)

    def forward(self, e_BN: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the vectors d side by side, [B, S H], and the bias terms, or None if there are none."""
        bias_z = nn.functional.pad(self.bias_z, (0, self.weight_z.shape[1] - len(self.bias_z)))
        z_BKZ = torch.addmm(bias_z, e_BN, self.weight_z).unflatten(-1, (-1, self.weight_d.shape[1]))
        z_SBZ, z_of_b = z_BKZ.transpose(0, 1).tensor_split((self.scaled,))
        d = torch.bmm(z_SBZ, self.weight_d).transpose(0, 1).flatten(1)
        if not len(z_of_b):
            return d, None
        return d, torch.bmm(z_of_b, self.weight_b).transpose(0, 1).flatten(1)


class DirectScaling(nn.Module):
    """One scaling vector for all gates of a matrix; see the module's docstring.

    The matrix starts orthogonal, the bias uniform around ``hyper_start``, as in the HyperRHN.
    """

    def __init__(self, config: HyperConfig, scaled: int):
        super().__init__()
        N, H = config.hyper_size, config.hidden_size
        self.scaled = scaled
        self.weight_d = nn.Parameter(torch.empty(N, H))
        self.bias_d = nn.Parameter(torch.empty(H))
        nn.init.orthogonal_(self.weight_d)
        init_bias_(self.bias_d, N)
        self.bias_d.data += config.hyper_start

    def forward(self, e_BN: Tensor) -> tuple[Tensor, None]:
        """Returns the vectors d side by side, [B, S H], and None for the bias terms."""
        return torch.addmm(self.bias_d, e_BN, self.weight_d).repeat(1, self.scaled), None


def names_of_maps(cell: Cell) -> list[tuple[str, str | None]]:
    """Returns the names of the weight and the bias of each of a cell's input maps."""
    names = {parameter.data_ptr(): name for name, parameter in cell.named_parameters()}
    return [(names[w.data_ptr()], None if b is None else names[b.data_ptr()]) for w, b in cell.input_maps()]


def below(parameters: dict, prefix: str) -> dict:
    """Returns the entries whose names start with the prefix, with the prefix removed."""
    return {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}


def naive_scaling(p, config, e, scaled, shifted):
    """Returns the vectors d and the bias terms for one sequence, each side by side."""
    if config.hyper_map == "direct":
        return np.tile(e @ p["weight_d"] + p["bias_d"], scaled), None
    Z = config.hyper_embed_size
    z = (e @ p["weight_z"] + np.concatenate([p["bias_z"], np.zeros(shifted * Z)])).reshape(-1, Z)
    d = [z[gate] @ p["weight_d"][gate] for gate in range(scaled)]
    b = [z[scaled + gate] @ p["weight_b"][gate] for gate in range(shifted)]
    return np.concatenate(d), np.concatenate(b) if b else None


def naive_hyper(p, config, x_TC, state, noise):
    """Runs the main cell's equations in numpy with weights that a hypernetwork rescales at every step."""
    H, L, layered = config.hidden_size, config.rhn_depth, config.hyper_output == "layers"
    main, hyper, inner = CELLS[config.main_cell], CELLS[config.hyper_cell], below(p, "hyper.")
    cell, fast, weights = main.cell(config.main()), hyper.cell(config.hyper()), below(p, "main.")
    maps, split = names_of_maps(cell), len(cell.state_sizes)
    hyper_config = replace(config.hyper(), input_size=x_TC.shape[1] + H * (config.hyper_input == "xh"))
    if config.hyper_input == "xh":
        for number, (name, _) in enumerate(names_of_maps(fast)):
            inner[name] = np.concatenate([inner[name], p[f"weight_seen.{number}"]])
    main_state, hyper_state, outputs = state[:split], state[split:], []
    for t, x in enumerate(x_TC):
        now = hyper_now = None
        if noise is not None:
            now = {name: draw[t : t + 1] if len(draw) > 1 else draw for name, draw in noise.items()}
            hyper_now = below(now, "hyper_")
        seen = drop(main_state[0], config.gal_dropout, at(now, "gal", 0))
        inputs = (x if config.hyper_input == "x" else np.concatenate([x, seen]))[None]
        if layered:
            e, hyper_state = naive_rhn(inner, hyper_config, inputs, hyper_state, hyper_now, all_layers=True)
        else:
            e, hyper_state = hyper.naive(inner, hyper_config, inputs, hyper_state, hyper_now)
        scaled = weights.copy()
        for number, name in enumerate(cell.state_matrices()):
            matrices, biases = [name], []
            if number == 0:
                matrices += [weight for weight, _ in maps if config.hyper_scales == "all"]
                biases += [bias for _, bias in maps if bias and config.hyper_map == "embedding"]
            gates = [sum(weights[name].shape[-1] // H for name in names) for names in (matrices, biases)]
            source = np.split(e[0], L)[number % L] if layered else e[0]
            vectors = naive_scaling(below(p, f"scaling.{number}."), config, source, *gates)
            for names, vector, change in zip((matrices, biases), vectors, (np.multiply, np.add), strict=True):
                for name in names:
                    own, vector = np.split(vector, [weights[name].shape[-1]])
                    scaled[name] = change(weights[name], own)
        y, main_state = main.naive(scaled, config.main(), x[None, : config.main_input_size], main_state, now)
        outputs.append(y[0])
    return np.stack(outputs), (*main_state, *hyper_state)


SMALL = dict(hyper_size=3, hyper_embed_size=2)
HIGHWAYS = SMALL | dict(
    main_cell="rhn", hyper_input="x", hyper_map="direct", rhn_depth=2, recurrent_dropout=0.3
)


@register_cell(
    "hyper",
    HyperConfig,
    naive_hyper,
    tests=(
        SMALL | NOISY | dict(hyper_cell="gru", hyper_scales="recurrent", hyper_dropout=0.2, hyper_context=2),
        HIGHWAYS | dict(hyper_cell="gru", gal_dropout=0.2, zoneout=0.1, h_detach=0.5),
        HIGHWAYS | dict(hyper_cell="rhn", hyper_output="layers", hyper_dropout=0.3, first_step="skip"),
    ),
)
class Hyper(Cell):
    """A cell scaled by another; see the module's docstring. State: that of ``main``, then that of ``hyper``.

    Both cells are initialised as on their own, but the hypernetwork's matrices for x and h as one matrix.
    """

    config: HyperConfig
    affine_weights = ("weight_seen",)
    recurrent_weights = ("weight_seen",)

    def __init__(self, config: HyperConfig):
        super().__init__(config)
        C, H = config.input_size, config.hidden_size
        layered = config.hyper_output == "layers"
        build = RHNTrace if layered else CELLS[config.hyper_cell].cell
        self.main: Cell = CELLS[config.main_cell].cell(config.main())
        self.hyper: Cell = build(config.hyper())
        if config.hyper_context:
            self.main.affine_weights = tuple(set(self.main.affine_weights) - {"weight_x", "weight_mx"})
        self.state_sizes = (*self.main.state_sizes, *self.hyper.state_sizes)
        self.begins = self.main.begins or self.hyper.begins
        self.prepared_states = len(self.hyper.state_sizes) if config.hyper_input == "x" else 0
        self.weight_seen = nn.ParameterList()
        if config.hyper_input == "xh":
            both = build(replace(config.hyper(), input_size=C + H))
            for (own, _), (joint, _) in zip(self.hyper.input_maps(), both.input_maps(), strict=True):
                own.data.copy_(joint[:C])
                self.weight_seen.append(joint[C:].detach().clone())
        # The first matrix's module also scales the input maps.
        maps = self.main.input_maps()
        scaled = sum(w.shape[1] // H for w, _ in maps) if config.hyper_scales == "all" else 0
        shifted = sum(len(b) // H for _, b in maps if b is not None)
        self.scaling = nn.ModuleList()
        for matrix in self.main.state_matrices().values():
            gates = matrix.shape[1] // H + scaled
            if config.hyper_map == "direct":
                self.scaling.append(DirectScaling(config, gates))
            else:
                self.scaling.append(EmbeddedScaling(config, gates, shifted))
            scaled = shifted = 0

    def sample_noise(self, T, B, device=None, generator=None):
        noise = self.main.sample_noise(T, B, device, generator)
        inner = self.hyper.sample_noise(T, B, device, generator)
        return noise | {f"hyper_{name}": draw for name, draw in inner.items()}

    def input_maps(self):
        size = self.config.hyper_context
        main = ((without_context(weight, size), None) for weight, _ in self.main.input_maps())
        return *main, *self.hyper.input_maps()

    def begin(self, g, first_TB1):
        return (*g, first_TB1)

    def prepare(self, g, state, mask_TB, noise, plan):
        """Runs a hypernetwork that reads the input alone; its output replaces its projections in g."""
        if self.config.hyper_input == "xh":
            return g, state
        maps, sizes = len(self.main.input_maps()), len(self.main.state_sizes)
        e, hyper_state = self._run_hyper(g[maps:], state[sizes:], mask_TB, noise, plan)
        first = g[maps + len(self.hyper.input_maps()) :]
        return (*g[:maps], e, *first), (*state[:sizes], *hyper_state)

    def _run_hyper(self, g, state, mask_TB, noise, plan):
        """Returns the hypernetwork's outputs and state; g may end with the first positions."""
        noise = inner_noise(noise)
        maps = len(self.hyper.input_maps())
        if len(g) > maps:
            g = self.hyper.begin(g[:maps], g[maps]) if self.hyper.begins else g[:maps]

        def run(g, state):
            g, state = self.hyper.prepare(g, state, mask_TB, noise, plan)
            return self.hyper.run(g, state, mask_TB, noise, plan)

        return with_hooks(self.hyper, run, g, state)

    def step(self, g_t, state, noise_t):
        maps, sizes = self.main.input_maps(), len(self.main.state_sizes)
        (g_main, rest), (main_state, hyper_state) = (
            (each[:n], each[n:]) for each, n in ((g_t, len(maps)), (state, sizes))
        )
        if self.config.hyper_input == "x":
            e, *first = rest
        else:
            n = len(self.weight_seen)
            first = rest[n:]
            seen = self.main.recurrent_input(main_state[0], noise_t)
            shares = apply_maps(seen, tuple((weight, None) for weight in self.weight_seen))
            g_1 = tuple(tensor.unsqueeze(0) for tensor in (*map(torch.add, rest[:n], shares), *first))
            noise_1 = None if noise_t is None else {name: draw.unsqueeze(0) for name, draw in noise_t.items()}
            plan = backends.Plan("reference")
            (e,), hyper_state = self._run_hyper(g_1, hyper_state, None, noise_1, plan)
        matrices, g_main = self._scale(g_main, maps, e)
        if first and self.main.begins:
            g_main = self.main.begin(g_main, first[0])
        y, main_state = with_hooks(self.main, self.main.step, g_main, main_state, noise_t, matrices)
        return y, (*main_state, *hyper_state)

    def _scale(self, g_main, maps, e_B):
        """Returns the main cell's matrices and projections, scaled according to the hypernetwork's output."""
        layers = e_B.chunk(self.config.rhn_depth, dim=-1) if self.config.hyper_output == "layers" else (e_B,)
        matrices: list[ScaledWeight] = []
        for number, matrix in enumerate(self.main.state_matrices().values()):
            d, b = self.scaling[number](layers[number % len(layers)])
            d, d_x = d.tensor_split((matrix.shape[1],), dim=-1)
            matrices.append(ScaledWeight(matrix, d))
            if number == 0:
                g_main = self._scale_input(g_main, maps, d_x, b)
        if self.taken is not None:
            d = torch.cat([matrix.scale_MN for matrix in matrices], dim=-1)
            self.taken.append(d.unflatten(-1, (-1, self.config.hidden_size)).transpose(0, 1).unsqueeze(0))
        return tuple(matrices), g_main

    def _scale_input(self, g_main, maps, d_BG, b_BG):
        """Returns the projections times ``d_BG`` if that has columns, plus biases and parts of ``b_BG``."""
        scaled = []
        for g, (_, bias) in zip(g_main, maps, strict=True):
            G = g.shape[-1]
            if d_BG.shape[-1]:
                d, d_BG = d_BG.tensor_split((G,), dim=-1)
                g = g * d
            if bias is not None:
                g = g + bias
                if b_BG is not None:
                    b, b_BG = b_BG.tensor_split((G,), dim=-1)
                    g = g + b
            scaled.append(g)
        return tuple(scaled)

    def scaling_vectors(self, state) -> Tensor:
        """Returns the vectors that scale the gates of the state's matrices, [gates, B, H], from a state.

        The state determines all of them if ``hyper_output`` is "last".
        """
        e, vectors = state[len(self.main.state_sizes)], []
        for scaling, matrix in zip(self.scaling, self.main.state_matrices().values(), strict=True):
            d = scaling(e)[0][:, : matrix.shape[1]]
            vectors.append(d.unflatten(-1, (-1, self.config.hidden_size)).transpose(0, 1))
        return torch.cat(vectors)

    def diagnostics(self):
        ranks = [scaling_rank(each.weight_d) for each in self.scaling if isinstance(each, EmbeddedScaling)]
        return {"scaling_rank": sum(ranks) / len(ranks)} if ranks else {}
