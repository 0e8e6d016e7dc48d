"""A sequence in segments: only the states between them are stored, which takes less memory and more time.

The backward pass recomputes each segment, which costs one more forward pass in total. Memory holds everything
of one segment at a time, and the inputs and outputs of the sequence with their gradients.

``torch.utils.checkpoint`` for every segment would compute the same. But it allocates what it keeps between
blocks that a segment frees, and the C library's allocator cannot reuse those: this takes up to 1.7 times the
memory.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rhhn_fairseq.ops.buffers import AUTOCASTING, state_dtype
from rhhn_fairseq.ops.loop import Noise, State

Run = Callable[..., tuple[Tensor, State]]
"""Maps parameters, input [T, B, C], state, first_TB1, mask_TB, noise to outputs [T, B, H] and last state."""


class Pass(NamedTuple):
    """A pass over a sequence, without its input and state.

    Attributes:
        run: runs the pass over any segment. parameters: the weights, in its order.
        first_TB1: where sequences without a state begin; None if that makes no difference.
        mask_TB: true at real positions; None where all are. noise: drawn for the whole pass, so that
            it is the same each time.
    """

    run: Run
    parameters: Sequence[Tensor]
    first_TB1: Tensor | None
    mask_TB: Tensor | None
    noise: Noise | None

    @property
    def masks(self) -> list[Tensor]:
        """All tensors that a segment reads besides its input, its state and the parameters."""
        masks = [self.first_TB1, self.mask_TB, *(self.noise or {}).values()]
        return [mask for mask in masks if mask is not None]


def computed_weights(module: nn.Module) -> dict[str, Tensor]:
    """Returns the weights that pruning and the like compute before a pass, by their names."""
    return {
        f"{prefix}.{name}".removeprefix("."): value
        for prefix, inner in module.named_modules()
        for name, value in vars(inner).items()
        if isinstance(value, Tensor) and value.requires_grad
    }


def run_in_segments(full_pass: Pass, steps: int, x_TBC: Tensor, state: State) -> tuple[Tensor, State]:
    """Runs a pass in segments of ``steps`` steps; see ``differentiable_again`` for second derivatives."""
    segments = _Segments(full_pass, steps, len(x_TBC), x_TBC.device.type)
    y, *after = _InSegments.apply(segments, len(state), x_TBC, *state, *full_pass.parameters)
    return y, tuple(after)


def differentiable_again(
    full_pass: Pass, x_TBC: Tensor, state: State, y: Tensor, after: State
) -> tuple[Tensor, State]:
    """Returns the outputs and the last state of a pass with a gradient that can be differentiated again.

    Their own gradient cannot, so with ``create_graph=True``, and for batched gradients, it is computed by
    running ``full_pass``.
    """
    loop = _Segments(full_pass, len(x_TBC), len(x_TBC), x_TBC.device.type)
    outputs = []
    with ExitStack() as versions:
        for output in (y, *after):
            # A function cannot pass on several views.
            outputs.append(output.clone() if output._is_view() else output)
            # torch 2.6 takes one tensor at a time.
            versions.enter_context(torch.autograd._unsafe_preserve_version_counter(outputs[-1]))
        y, *last = _Again.apply(loop, len(outputs), *outputs, x_TBC, *state, *full_pass.parameters)
    return y, tuple(last)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loop, count, *tensors):
        outputs, sources = tensors[:count], tensors[count:]
        ctx.loop, ctx.count, ctx.sources = loop, count, len(sources)
        ctx.save_for_backward(*sources)
        ctx.set_materialize_grads(False)
        # They are the same tensors, with another history.
        ctx.mark_dirty(*outputs)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        again = torch.is_grad_enabled()
        batched = False
        for gradient in gradients:
            # Of ``is_grads_batched=True``, for which operations have no backward pass.
            batched |= gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)
        if not again and not batched:
            return None, None, *gradients, *(None for _ in range(ctx.sources))
        with torch.enable_grad():
            # Views, since the state itself may lead back to the parameters, through an earlier call.
            sources = [t.view_as(t) if t.requires_grad else t for t in ctx.saved_tensors]
            x_TBC, *others = sources
            state, parameters = others[: ctx.count - 1], others[ctx.count - 1 :]
            outputs = ctx.loop(parameters, ctx.loop.slices[0], x_TBC, tuple(state))
        pairs = [
            (y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None and y.requires_grad
        ]
        wanted = [source for source in sources if source.requires_grad]
        ends, given = zip(*pairs, strict=True)
        computed = iter(torch.autograd.grad(ends, wanted, given, create_graph=again, allow_unused=True))
        found = [next(computed) if source.requires_grad else None for source in sources]
        return None, None, *(None for _ in gradients), *found


class _Segments:
    """Runs any segment of a pass."""

    def __init__(self, full_pass: Pass, steps: int, T: int, device: str):
        self.full_pass, self.T = full_pass, T
        self.slices = list(map(slice, range(0, T, steps), range(steps, T + steps, steps)))
        self.autocast: dict[str, Any] = {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device) if device in AUTOCASTING else None,
            "enabled": device in AUTOCASTING and torch.is_autocast_enabled(device),
            # Weights that were cast without a gradient must not be reused where a gradient is recorded.
            "cache_enabled": False,
        }

    def __call__(
        self, parameters: Sequence[Tensor], steps: slice, x_TBC: Tensor, state: State
    ) -> list[Tensor]:
        """Returns the outputs of a segment and the state after it."""
        run, _, first, mask, noise = self.full_pass
        first, mask = (None if tensor is None else tensor[steps] for tensor in (first, mask))
        if noise is not None:
            # A leading 1 means one mask for the whole sequence.
            noise = {name: draw if len(draw) < self.T else draw[steps] for name, draw in noise.items()}
        with torch.autocast(**self.autocast):
            y, after = run(parameters, x_TBC, state, first, mask, noise)
        return [y, *after]


class _InSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, segments: _Segments, count: int, x_TBC, *state_and_parameters):
        state: Sequence[Tensor] = state_and_parameters[:count]
        parameters = state_and_parameters[count:]
        ctx.types = [start.dtype for start in state]
        # As within a whole sequence, states of a narrow type stay wide from segment to segment.
        state = [start.to(state_dtype(start.dtype)) for start in state]
        # What is kept is allocated before the work begins, so that all memory of a segment is freed again.
        states = [start.new_empty(len(segments.slices), *start.shape) for start in state]
        outputs = x_TBC.new_empty(0)
        for number, steps in enumerate(segments.slices):
            for kept, start in zip(states, state, strict=True):
                kept[number] = start
            y, *state = segments(parameters, steps, x_TBC[steps], tuple(kept[number] for kept in states))
            if number == 0:
                outputs = y.new_empty(len(x_TBC), *y.shape[1:])
            outputs[steps] = y
        ctx.set_materialize_grads(False)
        # Saves parameters and masks, so that a change before the backward pass is an error, as elsewhere.
        ctx.save_for_backward(x_TBC, *states, *parameters, *segments.full_pass.masks)
        ctx.segments = segments
        return outputs, *(last.to(dtype) for last, dtype in zip(state, ctx.types, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *dstate):
        segments, (x_TBC, *kept) = ctx.segments, ctx.saved_tensors
        states, rest = kept[: len(dstate)], kept[len(dstate) :]
        weights = rest[: len(segments.full_pass.parameters)]
        # A weight may itself be computed from others, to which each segment would lead back.
        needed = ctx.needs_input_grad[len(ctx.needs_input_grad) - len(weights) :]
        values = [
            weight.detach().requires_grad_(needs) for weight, needs in zip(weights, needed, strict=True)
        ]
        parameters = [value for value in values if value.requires_grad]
        dlast = [None if d is None else d.to(states[0].dtype) for d in dstate]
        needs_x = ctx.needs_input_grad[2]
        dx = torch.zeros_like(x_TBC) if needs_x else None
        # Sums over many segments have the state type, for the same reason.
        total = [torch.zeros_like(p, dtype=state_dtype(p.dtype)) for p in parameters]
        for number, steps in reversed(list(enumerate(segments.slices))):
            x = x_TBC[steps].detach().requires_grad_(needs_x)
            state = [starts[number].detach().requires_grad_() for starts in states]
            with torch.enable_grad():
                outputs = segments(values, steps, x, tuple(state))
            dx_segment, dlast, computed = _gradients(
                outputs, [None if dy is None else dy[steps], *dlast], x, state, parameters
            )
            del outputs
            if dx is not None and dx_segment is not None:
                dx[steps] = dx_segment
            for sum_, new in zip(total, computed, strict=True):
                if new is not None:
                    sum_ += new
            del dx_segment, computed
        dfirst = [None if d is None else d.to(dtype) for d, dtype in zip(dlast, ctx.types, strict=True)]
        sums = iter(total)
        computed = [next(sums).to(value.dtype) if value.requires_grad else None for value in values]
        return None, None, dx, *dfirst, *computed


def _gradients(outputs, gradients, x, state, parameters):
    """Returns the gradients of x, of the tensors of the state and of the parameters; None if missing."""
    pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None and y.requires_grad]
    sources = [*([x] if x.requires_grad else []), *state, *parameters]
    if not pairs:
        return None, [None] * len(state), [None] * len(parameters)
    ends, given = zip(*pairs, strict=True)
    computed = list(torch.autograd.grad(ends, sources, given, allow_unused=True))
    dx = computed.pop(0) if x.requires_grad else None
    return dx, computed[: len(state)], computed[len(state) :]
