"""How every cell runs: checks, the choice of a backend, the pass, segments, and the loop over its steps.

``Cell`` is the class that cells subclass; what they define is in ``contract``.

Shapes: T time, B batch, C input, H hidden.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rhhn_fairseq.cells.config import describe_config
from rhhn_fairseq.cells.contract import Contract
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends, policy, recompute
from rhhn_fairseq.ops.backends import Plan, Request, lengths, torch_nn
from rhhn_fairseq.ops.buffers import computed_dtype
from rhhn_fairseq.ops.loop import Noise, State, clear_state, scan
from rhhn_fairseq.ops.matmul import gemm

NOISE_WORDS = {
    "c_detach": "c-detach",
    "gal": "Gal dropout",
    "h_detach": "h-detach",
    "update": "recurrent dropout",
    "zoneout_c": "zoneout",
}
"""What the names of a pass's noise mean, where the two differ."""


class Cell(Contract):
    """A recurrent cell: the contract's methods, and all that runs them over a sequence."""

    def forward(
        self,
        x_TBC: Tensor,
        state: State | None = None,
        mask_TB: Tensor | None = None,
        noise: Noise | None = None,
        resets_TB: Tensor | None = None,
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
            resets_TB: bool [T, B], true before the steps at which a sequence starts anew without a state, as
                if it were cut there.

        Returns:
            the outputs [T, B, H] and the state after the last step.

        Raises:
            UsageError: the input, state, mask or noise does not have the shape the cell was built for, T or B
                is 0, mask or noise is not bool, or the backend that is asked for cannot run the pass.
        """
        self._check_shapes(x_TBC, state, {"mask": mask_TB, "resets": resets_TB}, noise)
        computed, parametrized = Tensor in map(type, vars(self).values()), "parametrizations" in self._modules
        for module in self.children():
            for part in (module, *module.children()):
                computed = computed or Tensor in map(type, vars(part).values())
                parametrized = parametrized or "parametrizations" in part._modules
                # A list of weights is never called, so what computes them, such as pruning, is run here.
                if part._forward_pre_hooks and isinstance(part, nn.ParameterList):
                    computed = True
                    for hook in part._forward_pre_hooks.values():
                        hook(part, ())
        if parametrized and not parametrize._cache_enabled:
            # One weight for all steps: a parametrization may draw it, or move on with every call.
            with parametrize.cached():
                return self.forward(x_TBC, state, mask_TB, noise, resets_TB)
        T, B, _ = x_TBC.shape
        if mask_TB is not None:
            # A NaN times a zero gradient is NaN, so padding is cleared before it multiplies a weight.
            x_TBC = x_TBC.masked_fill(~mask_TB.unsqueeze(-1), 0.0)
        if noise is None and self.training:
            noise = self.sample_noise(T, B, x_TBC.device)
        first = None
        if self.begins and (state is None or resets_TB is not None):
            first = first_positions(T, B, mask_TB, x_TBC.device, resets_TB, state is None)
        if state is None:
            state = self.zero_state(B, x_TBC.device, x_TBC.dtype)
        if resets_TB is not None:
            noise = (noise or {}) | {"resets": resets_TB.unsqueeze(-1)}
        if torch.compiler.is_compiling():
            forced = self.backend or policy.current().kernel
            if any(is_hooked(module) for module in self.children()):
                forced = "reference"
            dtype = computed_dtype(x_TBC.device, x_TBC.dtype)
            plan = backends.select_traced(self.operation, x_TBC.device, dtype, forced)
        else:
            plan = backends.select(self.request(x_TBC, state, mask_TB, noise))
        in_segments = 0 < self.config.recompute_steps < T and torch.is_grad_enabled()
        in_segments = in_segments and (torch.compiler.is_compiling() or gemm.transformation() is None)
        if in_segments:
            weights = self._weights()
            run = functools.partial(self._run_again, plan, list(weights))
            full_pass = recompute.Pass(run, list(weights.values()), first, mask_TB, noise)
            y, after = recompute.run_in_segments(full_pass, self.config.recompute_steps, x_TBC, state)
        else:
            y, after = self.run_pass(x_TBC, state, first, mask_TB, noise, plan)
        steps_run = plan.backend == "reference" and not in_segments
        if steps_run or torch.compiler.is_compiling() or type(y) is not Tensor or not y.requires_grad:
            return y, after
        own: list[Tensor] = list(self.parameters())
        names: list[str] | None = None
        if self._forward_pre_hooks or computed or not own:
            # Pruning computes weights before a pass, and torch.nn.DataParallel replicas have tensors; looking
            # for them takes longer.
            weights = self._weights()
            own, names = list(weights.values()), list(weights)
        run = functools.partial(self._run_again, backends.make_plan("reference"), names)
        full_pass = recompute.Pass(run, own, first, mask_TB, noise)
        return recompute.differentiable_again(full_pass, x_TBC, state, y, after)

    def _weights(self) -> dict[str, Tensor]:
        """Returns the weights of a pass by their names in a ``_Runner``."""
        # ``functional_call`` may have replaced the parameters for this pass only, as weight drop does, also
        # those that have no gradient.
        named: dict[str, Tensor] = {f"cell.{n}": p for n, p in self.named_parameters()}
        if torch.compiler.is_compiling():
            return named
        return named | {f"cell.{name}": p for name, p in recompute.computed_weights(self).items()}

    def _run_again(
        self, plan: Plan, names: Sequence[str] | None, values: Sequence[Tensor], *arguments
    ) -> tuple[Tensor, State]:
        """Runs ``run_pass`` with the first pass's values of weights, those of ``names`` or all parameters."""
        if names is None:
            names = [f"cell.{name}" for name, _ in self.named_parameters()]
        named = dict(zip(names, values, strict=True))
        # A pass that is run again for its gradient is not another one to take scaling vectors of.
        taken, self.taken = self.taken, None if torch.is_grad_enabled() else self.taken
        try:
            return torch.func.functional_call(_Runner(self, plan), named, arguments)
        finally:
            self.taken = taken

    def run_pass(
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
            if mask_TB is not None:
                return torch_nn.run_padded(kind, x_TBC, mask_TB, state, weights, self.training)
            if noise:
                return torch_nn.run_between_resets(
                    kind, x_TBC, noise["resets"], state, weights, self.training
                )
            if len(x_TBC) == 1:
                return torch_nn.step(kind, x_TBC, state, weights)
            return torch_nn.run(kind, x_TBC, state, weights, self.training)
        # ``len`` would fix a length that torch.export keeps dynamic.
        T = x_TBC.shape[0]
        if noise is not None and "resets" in noise:
            # Operations read the resets between steps only.
            state = clear_state(noise["resets"][0], state)
        if plan.records and not lengths.keeps_length(self, T):
            x_TBC, first_TB1, mask_TB, noise = lengths.pad_to_graph_length(x_TBC, first_TB1, mask_TB, noise)
        # A single step of few rows has products of its own.
        g = self.project(x_TBC, gemm=plan.gemm if plan.is_fused and not plan.is_single_step else None)
        if first_TB1 is not None:
            g = self.begin(g, first_TB1)
        g, state = self.prepare(g, state, mask_TB, noise, plan)
        y_TBH, state = self.run(g, state, mask_TB, noise, plan)
        if self.taken:
            self.taken[-1] = self.taken[-1][:T]
        return y_TBH if y_TBH.shape[0] == T else y_TBH[:T], state

    def run(
        self, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None, plan: Plan
    ) -> tuple[Tensor, State]:
        """Runs all steps on what ``prepare`` returned."""
        if plan.is_fused:
            return self.run_fused(g, state, mask_TB, noise, plan)

        one_step = self.step_of_a_pass()
        # What ``prepare`` has run is complete: neither padding nor a reset changes it here.
        count = len(state) - self.prepared_states
        state, prepared = state[:count], state[count:]

        def step(g_t, state, noise_t):
            y_BH, state = one_step(g_t, (*state, *prepared), noise_t)
            return (y_BH,), state[:count]

        dtype, types = g[0].dtype, [tensor.dtype for tensor in state]
        if any(kind != dtype for kind in types) and not torch.is_autocast_enabled(g[0].device.type):
            # Without autocast, which casts what a step needs, such a state's type differs from the weights'.
            state = tuple(tensor.to(dtype) for tensor in state)
        (y_TBH,), state = scan(step, g, state, mask_TB, noise)
        return y_TBH, (*(tensor.to(kind) for tensor, kind in zip(state, types, strict=True)), *prepared)

    def step_of_a_pass(self) -> Any:
        """Returns ``step`` with the matrices that all steps of a pass share."""
        step: Any = self.step
        matrices = self.shared_matrices()
        return step if matrices is None else functools.partial(step, matrices=matrices)

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
            if is_hooked(module) and not isinstance(module, nn.ParameterList):
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

    def plan_of_steps(self, x_TBC: Tensor) -> Plan:
        """Returns the plan for ``prepare`` when it is called one step at a time, as for fed-back input."""
        return backends.make_plan("reference")

    def weights_named(self, attribute: str) -> dict[str, Any]:
        """Returns the weights, or lists of weights, whose names an attribute of the cell holds.

        Args:
            attribute: ``affine_weights`` or ``recurrent_weights``.

        Raises:
            UsageError: the cell has no weight of such a name.
        """
        weights = {}
        for name in getattr(self, attribute):
            try:
                weights[name] = operator.attrgetter(name)(self)
            except AttributeError:
                kind = type(self).__name__
                raise UsageError(
                    f"{kind}.{attribute} names {name!r}, which {kind} lacks; name its own weights"
                ) from None
        return weights

    def extra_repr(self) -> str:
        """Sizes, and the options that differ from their defaults."""
        return describe_config(self.config)

    def _check_shapes(self, x_TBC, state, masks, noise) -> None:
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
        for key, mask_TB in masks.items():
            if mask_TB is not None and (mask_TB.shape != (T, B) or mask_TB.dtype != torch.bool):
                raise UsageError(
                    f"{name}: {key} is {mask_TB.dtype} of shape {tuple(mask_TB.shape)}, "
                    f"expected torch.bool of shape {(T, B)}"
                )
        for key, tensor in (noise or {}).items():
            shape = tuple(tensor.shape)
            if tensor.dtype != torch.bool:
                raise UsageError(f"{name}: noise {key!r} is {tensor.dtype}, expected torch.bool")
            if len(shape) != 3 or shape[0] not in (1, T) or shape[1] not in (1, B):
                raise UsageError(f"{name}: noise {key!r} has shape {shape}, expected [{T} or 1, {B} or 1, ·]")


class _Runner(nn.Module):
    """Calls ``cell.run_pass``, so that ``functional_call`` can replace the parameters of the cell."""

    def __init__(self, cell: Cell, plan: Plan):
        super().__init__()
        self.cell, self.plan = cell, plan

    def forward(self, x_TBC: Tensor, state: State, first_TB1, mask_TB, noise) -> tuple[Tensor, State]:
        return self.cell.run_pass(x_TBC, state, first_TB1, mask_TB, noise, self.plan)


def first_positions(
    T: int,
    B: int,
    mask_TB: Tensor | None,
    device=None,
    resets_TB: Tensor | None = None,
    starts: bool = True,
) -> Tensor:
    """Returns where sequences without a state have their first step, bool [T, B, 1].

    Only cells with ``begins`` use it.

    Args:
        starts: whether the first sequences have no state either, as those after resets.
    """
    if mask_TB is None:
        mask_TB = torch.ones(T, B, dtype=torch.bool, device=device)
    steps = mask_TB.cumsum(0)
    if resets_TB is not None:
        # Steps that are over when the latest sequence begins; -1 if it began with a state.
        over = torch.where(resets_TB, steps - mask_TB.long(), 0 if starts else -1)
        steps = steps - over.cummax(0).values
    return (mask_TB & (steps == 1)).unsqueeze(-1)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks that run when it is called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
