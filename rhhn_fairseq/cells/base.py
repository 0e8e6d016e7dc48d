"""The interface of every recurrent cell, and the code that all cells share.

Shapes: T time, B batch, C input, H hidden, G gates times H. Vectors are rows: an input [B, C] is
multiplied as ``x_BC @ W_CG``.

A cell defines its equations (``step``, or ``step_with`` if a hypernetwork may scale its matrices), the affine
maps of its input (``input_maps``) and what never depends on the main state (``prepare``). The loop over
time, masks, carried state and beam reordering are written once, here and in ``ops``. A cell with a fused
operation passes its parameters to it in ``run_operation``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import CellConfig, StateConfig, describe_config
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends, gemm, lengths, policy, recompute, torch_nn
from rhhn_fairseq.ops.backends import Plan, Request
from rhhn_fairseq.ops.buffers import computed_dtype
from rhhn_fairseq.ops.gemm import Matrix, ScaledWeight, affine
from rhhn_fairseq.ops.loop import Noise, State, noise_at, scan
from rhhn_fairseq.ops.regularise import detach_by_coin, draw_mask, dropout
from rhhn_fairseq.saving import Pretrained

InputMap = tuple[Tensor, Tensor | None]


NOISE_WORDS = {
    "c_detach": "c-detach",
    "gal": "Gal dropout",
    "h_detach": "h-detach",
    "update": "recurrent dropout",
    "zoneout_c": "zoneout",
}
"""What the names of a pass's noise mean, where the two differ."""


class Cell(Pretrained, nn.Module):
    """A recurrent cell; see the module's docstring. Subclasses set ``state_sizes`` and ``step``.

    Attributes:
        config: the checked configuration.
        state_sizes: widths of the state's tensors, the first of which is the output.
        begins: whether the first step of a sequence without a state differs from the others, see ``begin``.
        operation: name of the fused operation that computes what ``step`` does, see ``backends``; None
            if there is none. A subclass does not inherit it, because it may override ``step``.
        affine_weights: names of the weights that only ``ops.gemm.affine`` reads, so that they may be
            quantised.
        recurrent_weights: names of the weights that multiply a state, which ``layers.weight_drop`` drops;
            inner cells name their own. A cell whose matrices have other names sets both attributes.
        backend: name of the backend that this cell must use; None leaves the choice to the environment or
            ``backends``.
        keeps_initial_values: whether a model that draws all weights anew leaves this cell's as they are,
            because they multiply each other and near zero would let nothing pass. A model also leaves those
            of cells with gains or scaling vectors.
    """

    kind = "cell"
    state_sizes: tuple[int, ...]
    config: StateConfig
    begins: bool = False
    operation: str | None = None
    affine_weights: tuple[str, ...] = ("weight_x", "weight_h")
    recurrent_weights: tuple[str, ...] = ("weight_h",)
    backend: str | None = None
    keeps_initial_values: bool = False

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        cls.operation = vars(cls).get("operation")

    def __init__(self, config: StateConfig):
        super().__init__()
        self.config = config
        self.state_sizes = (config.hidden_size,)

    def input_maps(self) -> tuple[InputMap, ...]:
        """Returns the affine maps of the input: pairs of a weight [C, ·] and a bias [·] or None."""
        raise NotImplementedError(f"{type(self).__name__} has no input maps")

    def maps_of(self, columns: slice) -> tuple[InputMap, ...]:
        """Returns the input maps of a slice of the input's columns; the slice that starts at 0 has the bias.

        The projections of slices that cover the input add up to the whole projection. Take slices once,
        before a loop: every slicing costs a zero-filled gradient of the whole weight.
        """
        first = columns.start in (None, 0)
        return tuple((weight[columns], bias if first else None) for weight, bias in self.input_maps())

    def project(self, x_TBC: Tensor, gemm: str | None = None) -> tuple[Tensor, ...]:
        """Returns the projections of the input, [T, B, ·], in the order in which ``step`` takes them.

        Each weight takes one GEMM for the whole sequence.

        Args:
            gemm: which GEMM to use, see ``ops.gemm.affine``.
        """
        return apply_maps(x_TBC, self.input_maps(), gemm)

    def begin(self, g: tuple[Tensor, ...], first_TB1: Tensor | None) -> tuple[Tensor, ...]:
        """Adjusts the projections of sequences that start without a state; by default, changes nothing.

        Args:
            first_TB1: what ``first_positions`` returns.
        """
        return g

    def first_positions(self, T: int, B: int, mask_TB: Tensor | None, device=None) -> Tensor:
        """Returns where sequences without a state have their first step, bool [T, B, 1].

        Only cells with ``begins`` use it.
        """
        if mask_TB is None:
            mask_TB = torch.ones(T, B, dtype=torch.bool, device=device)
        return (mask_TB & (mask_TB.cumsum(0) == 1)).unsqueeze(-1)

    def prepare(
        self, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None, plan: Plan
    ) -> tuple[tuple[Tensor, ...], State]:
        """Computes, for the whole sequence, what never reads the main state; by default, nothing.

        Args:
            plan: how the pass runs.
        """
        return g, state

    def sample_noise(self, T: int, B: int, device=None, generator=None) -> Noise:
        """Draws every random number of a training pass of T steps over B sequences.

        Returns:
            bool tensors [T or 1, B or 1, ·] by name: a leading 1 means one mask per sequence,
            [T, 1, 1] one coin per time step. Empty when the configuration asks for no noise.
        """
        config, noise = self.config, {}
        H = config.hidden_size
        if isinstance(config, CellConfig) and config.gal_dropout:
            noise["gal"] = draw_mask((1, B, H), 1.0 - config.gal_dropout, device, generator)
        if config.zoneout:
            noise["zoneout"] = draw_mask((T, B, H), config.zoneout, device, generator)
        if isinstance(config, CellConfig) and config.h_detach:
            noise["h_detach"] = draw_mask((T, 1, 1), config.h_detach, device, generator)
        return noise

    def step(self, g_t: tuple[Tensor, ...], state: State, noise_t: Noise | None) -> tuple[Tensor, State]:
        """Computes one time step by the paper's equations.

        Args:
            g_t: the projection at this step, tensors [B, ·].
            state: tensors [B, ·] in ``state_sizes`` order.
            noise_t: this step's share of ``sample_noise``; None in evaluation.

        Returns:
            the output [B, H] and the next state.
        """
        return self.step_with(tuple(self.state_matrices().values()), g_t, state, noise_t)

    def state_matrices(self) -> dict[str, Matrix]:
        """Returns by name the matrices by which ``step_with`` multiplies states with ``ops.gemm.affine``."""
        return {}

    def step_with(
        self,
        matrices: tuple[Matrix | ScaledWeight, ...],
        g_t: tuple[Tensor, ...],
        state: State,
        noise_t: Noise | None,
    ) -> tuple[Tensor, State]:
        """Computes ``step`` with matrices other than the cell's own, such as ones scaled by a hypernetwork.

        Args:
            matrices: as many as ``state_matrices`` has, in its order.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def weights_named(self, attribute: str) -> dict[str, Any]:
        """Returns the weights, or lists of weights, whose names an attribute of the cell holds.

        Args:
            attribute: ``affine_weights`` or ``recurrent_weights``.

        Raises:
            UsageError: the cell has no weight of such a name.
        """
        weights = {}
        for name in getattr(self, attribute):
            if not hasattr(self, name):
                kind = type(self).__name__
                raise UsageError(
                    f"{kind}.{attribute} names {name!r}, which {kind} lacks; name its own weights"
                )
            weights[name] = getattr(self, name)
        return weights

    def make_step(self) -> Callable[..., tuple[Tensor, State]]:
        """Returns ``step`` for one pass. A cell may override it to compute once what all steps share."""
        return self.step

    def forward(
        self,
        x_TBC: Tensor,
        state: State | None = None,
        mask_TB: Tensor | None = None,
        noise: Noise | None = None,
    ) -> tuple[Tensor, State]:
        """Runs the cell over a sequence.

        Args:
            x_TBC: input [T, B, C].
            state: the state to start from, tensors [B, ·] in ``state_sizes`` order; None for zeros, where
                ``begin`` applies.
            mask_TB: bool [T, B], true at real positions. At the others the state passes through
                unchanged and the output is zero, whatever the input holds there.
            noise: what ``sample_noise`` returned. If None, a cell in training mode draws it here, and in
                evaluation mode there is none.

        Returns:
            the outputs [T, B, H] and the state after the last step.

        Raises:
            UsageError: the input, state, mask or noise does not have the shape the cell was built for, T or B
                is 0, mask or noise is not bool, or the backend that is asked for cannot run the pass.
        """
        self._check_shapes(x_TBC, state, mask_TB, noise)
        T, B, _ = x_TBC.shape
        if mask_TB is not None:
            # A NaN times a zero gradient is NaN, so padding is cleared before it multiplies a weight.
            x_TBC = x_TBC.masked_fill(~mask_TB.unsqueeze(-1), 0.0)
        if noise is None and self.training:
            noise = self.sample_noise(T, B, x_TBC.device)
        first = None
        if state is None:
            state = self.zero_state(B, x_TBC.device, x_TBC.dtype)
            first = self.first_positions(T, B, mask_TB, x_TBC.device) if self.begins else None
        if torch.compiler.is_compiling():
            forced = self.backend or policy.current().kernel
            if any(is_hooked(module) for module in self.children()):
                forced = "reference"
            dtype = computed_dtype(x_TBC.device, x_TBC.dtype)
            plan = backends.select_traced(self.operation, x_TBC.device, dtype, forced)
        else:
            plan = backends.select(self.request(x_TBC, state, mask_TB, noise))
        in_segments = 0 < self.config.recompute_steps < T and torch.is_grad_enabled()
        if in_segments and (torch.compiler.is_compiling() or gemm.transformation() is None):
            return self._run_in_segments(x_TBC, state, first, mask_TB, noise, plan)
        return self.run(x_TBC, state, first, mask_TB, noise, plan)

    def _run_in_segments(
        self, x_TBC: Tensor, state: State, first: Tensor | None, mask_TB: Tensor | None, noise, plan: Plan
    ) -> tuple[Tensor, State]:
        """Like ``run``, but each segment is recomputed in the backward pass."""
        # ``functional_call`` may have replaced the parameters for this pass only, as weight drop does.
        runner = _Runner(self, plan)
        weights: dict[str, Tensor] = {name: p for name, p in runner.named_parameters() if p.requires_grad}
        if not torch.compiler.is_compiling():
            weights |= recompute.computed_weights(runner)

        def run(values, *arguments) -> tuple[Tensor, State]:
            return torch.func.functional_call(runner, dict(zip(weights, values, strict=True)), arguments)

        full_pass = recompute.Pass(run, list(weights.values()), first, mask_TB, noise)
        return recompute.run_in_segments(full_pass, self.config.recompute_steps, x_TBC, state)

    def request(
        self,
        x_TBC: Tensor,
        state: State | None = None,
        mask_TB: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Request:
        """Returns what ``backends`` needs to know about a pass; arguments as in ``forward``."""
        (T, B, _), device, dtype = x_TBC.shape, x_TBC.device, x_TBC.dtype
        rounds, wide = backends.rounding(device), False
        forced = self.backend or policy.current().kernel
        for tensor in state or ():
            wide = wide or tensor.dtype != dtype
        return Request(
            type(self).__name__,
            self.operation,
            T,
            B,
            self.config.hidden_size,
            device,
            dtype if rounds is None else computed_dtype(device, dtype),
            torch.is_grad_enabled(),
            self.extras(mask_TB, noise),
            rounds,
            wide,
            T == 1 and forced is None and self.fits_few_rows(state),
            forced,
            self.needs_steps(),
        )

    def needs_steps(self) -> str | None:
        """Returns what in this pass only the loop over ``step`` supports, in words; None if nothing does."""
        if (transformation := gemm.transformation()) is not None:
            return transformation
        if torch.jit.is_tracing():
            return "torch.jit.trace"
        for name, module in self.named_children():
            if is_hooked(module):
                return f"a hook on {name!r}"
        return None

    def extras(self, mask_TB: Tensor | None, noise: Noise | None) -> tuple[str, ...]:
        """Returns what a pass needs beyond the plain equations of the LSTM or GRU, in words."""
        names = [NOISE_WORDS.get(name, name) for name in sorted(noise)] if noise else []
        if self.config.zoneout and "zoneout" not in names:
            names.append("zoneout")
        if mask_TB is not None:
            names.append("padding masks")
        return tuple(names)

    def fits_few_rows(self, state: State | None) -> bool:
        """Whether a single step without a gradient has a compiled function of its own; by default, no."""
        return False

    def run(
        self,
        x_TBC: Tensor,
        state: State,
        first_TB1: Tensor | None,
        mask_TB: Tensor | None,
        noise: Noise | None,
        plan: Plan,
    ) -> tuple[Tensor, State]:
        """Runs ``forward`` after its arguments are checked and the backend is selected.

        Args:
            first_TB1: what ``first_positions`` returns.
        """
        if plan.backend == "torch_nn":
            kind, weights = self.operation, self.torch_weights()
            assert kind is not None  # ``select`` chooses torch.nn for named operations only.
            if len(x_TBC) == 1 and not torch.is_grad_enabled():
                return torch_nn.step(kind, x_TBC, state, weights)
            return torch_nn.run(kind, x_TBC, state, weights, self.training)
        # ``len`` would fix a length that torch.export keeps dynamic.
        T = x_TBC.shape[0]
        if plan.records and not lengths.keeps_length(self, T):
            x_TBC, first_TB1, mask_TB, noise = lengths.pad_to_graph_length(x_TBC, first_TB1, mask_TB, noise)
        g = self.project(x_TBC, plan.gemm if plan.is_fused else None)
        if first_TB1 is not None:
            g = self.begin(g, first_TB1)
        g, state = self.prepare(g, state, mask_TB, noise, plan)
        y_TBH, state = self.run_steps(g, state, mask_TB, noise, plan)
        return y_TBH if y_TBH.shape[0] == T else y_TBH[:T], state

    def run_steps(
        self, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None, plan: Plan
    ) -> tuple[Tensor, State]:
        """Runs all steps on what ``prepare`` returned."""
        if plan.is_fused:
            return self.run_operation(g, state, mask_TB, noise, plan)

        one_step = self.make_step()

        def step(g_t, state, noise_t):
            y_BH, state = one_step(g_t, state, noise_t)
            return (y_BH,), state

        dtype, types = g[0].dtype, [tensor.dtype for tensor in state]
        if any(kind != dtype for kind in types) and not torch.is_autocast_enabled(g[0].device.type):
            # Without autocast, which casts what a step needs, such a state's type differs from the weights'.
            state = tuple(tensor.to(dtype) for tensor in state)
        (y_TBH,), state = scan(step, g, state, mask_TB, noise)
        return y_TBH, tuple(tensor.to(kind) for tensor, kind in zip(state, types, strict=True))

    def run_operation(
        self, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None, plan: Plan
    ) -> tuple[Tensor, State]:
        """Computes ``run_steps`` with the cell's fused operation."""
        raise NotImplementedError(f"{type(self).__name__} has no fused operation")

    def plan_of_steps(self, x_TBC: Tensor) -> Plan:
        """Returns the plan for ``prepare`` when it is called one step at a time, as for fed-back input."""
        return backends.make_plan("reference")

    def torch_weights(self) -> torch_nn.Weights:
        """Returns the parameters in the layout of torch.nn's layer with the same equations."""
        raise NotImplementedError(f"torch.nn has no {type(self).__name__}")

    def recurrent_input(self, h_BH: Tensor, noise_t: Noise | None) -> Tensor:
        """Returns the state as a matrix reads it: detached by the coin (h-detach), dropped out (Gal)."""
        assert isinstance(self.config, CellConfig)
        h_BH = detach_by_coin(h_BH, noise_at(noise_t, "h_detach"))
        return dropout(h_BH, self.config.gal_dropout, noise_at(noise_t, "gal"))

    def zero_state(self, B: int, device=None, dtype=None) -> State:
        """Returns the zero state of B sequences."""
        state = []
        for size in self.state_sizes:
            state.append(torch.zeros(B, size, device=device, dtype=dtype))
        return tuple(state)

    def adjust_initial_values(self) -> None:
        """Changes weights that have just been drawn as the options say; by default, nothing.

        A model that draws the weights anew calls it afterwards.
        """

    def diagnostics(self) -> dict[str, float]:
        """Returns figures about the trained weights for the log; by default, none."""
        return {}

    def extra_repr(self) -> str:
        """Sizes, and the options that differ from their defaults."""
        return describe_config(self.config)

    def _check_shapes(self, x_TBC, state, mask_TB, noise) -> None:
        name, C = type(self).__name__, self.config.input_size
        if x_TBC.dim() != 3 or x_TBC.shape[-1] != C:
            raise UsageError(f"{name}: input has shape {tuple(x_TBC.shape)}, expected [T, B, {C}]")
        T, B, _ = x_TBC.shape
        if T == 0 or B == 0:
            raise UsageError(f"{name}: input has shape {tuple(x_TBC.shape)}, T and B must be 1 or more")
        if state is not None:
            expected = [(B, size) for size in self.state_sizes]
            shapes = [tuple(tensor.shape) for tensor in state]
            if shapes != expected:
                raise UsageError(f"{name}: state has shapes {shapes}, expected {expected}")
        if mask_TB is not None and (mask_TB.shape != (T, B) or mask_TB.dtype != torch.bool):
            raise UsageError(
                f"{name}: mask is {mask_TB.dtype} of shape {tuple(mask_TB.shape)}, "
                f"expected torch.bool of shape {(T, B)}"
            )
        for key, tensor in (noise or {}).items():
            shape = tuple(tensor.shape)
            if tensor.dtype != torch.bool:
                raise UsageError(f"{name}: noise {key!r} is {tensor.dtype}, expected torch.bool")
            if len(shape) != 3 or shape[0] not in (1, T) or shape[1] not in (1, B):
                raise UsageError(f"{name}: noise {key!r} has shape {shape}, expected [{T} or 1, {B} or 1, ·]")


class _Runner(nn.Module):
    """Calls ``cell.run``, so that ``functional_call`` can replace the parameters of the cell."""

    def __init__(self, cell: Cell, plan: Plan):
        super().__init__()
        self.cell, self.plan = cell, plan

    def forward(self, x_TBC: Tensor, state: State, first_TB1, mask_TB, noise) -> tuple[Tensor, State]:
        return self.cell.run(x_TBC, state, first_TB1, mask_TB, noise, self.plan)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks that run when it is called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def detach_state(state: State) -> State:
    """Returns the state detached from the graph, where truncated back-propagation stops."""
    return tuple(tensor.detach() for tensor in state)


def reorder_state(state: State, index_B: Tensor) -> State:
    """Returns the state of the chosen sequences, for beam search; ``index_B`` may repeat entries."""
    return tuple(tensor.index_select(0, index_B) for tensor in state)


def apply_maps(x: Tensor, maps: tuple[InputMap, ...], gemm: str | None = None) -> tuple[Tensor, ...]:
    """Returns ``x W + b`` for each weight and bias; x is [..., C], ``gemm`` as for ``ops.gemm.affine``."""
    g = []
    for weight, bias in maps:
        g.append(affine(x, weight, bias, gemm))
    return tuple(g)


def orthogonal_(weight: Tensor, gates: int = 1) -> None:
    """Fills each of ``gates`` equal column blocks of ``weight`` [C, G] with an orthogonal matrix."""
    for block in weight.data.chunk(gates, dim=1):
        # No float type smaller than float32 has the decomposition that this needs.
        wide = torch.empty_like(block, dtype=torch.promote_types(block.dtype, torch.float32))
        block.copy_(nn.init.orthogonal_(wide))


def glorot_(weight: Tensor, gates: int = 1) -> None:
    """Fills each of ``gates`` column blocks of ``weight`` [C, G] as Glorot uniform, by its own fan."""
    for block in weight.data.chunk(gates, dim=1):
        nn.init.xavier_uniform_(block)
