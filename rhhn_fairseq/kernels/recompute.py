"""A sequence in parts of which only the states in between are kept: memory for time.

Each part is computed again in the backward pass, which costs one more forward pass in all. What is kept at
any time is everything of one part, and inputs, outputs and their gradients of the whole.

``torch.utils.checkpoint`` for every part would do the same, but what it keeps comes to lie between what a
part frees, where the C library's allocator cannot use that again: up to 1.7 times the memory.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rhhn_fairseq.kernels.buffers import state_dtype

if TYPE_CHECKING:
    from rhhn_fairseq.cells.base import Cell, Noise, State


def in_parts(
    cell: "Cell",
    steps: int,
    x_TBC: Tensor,
    state: "State",
    first_TB1: Tensor | None,
    mask_TB: Tensor | None,
    noise: "Noise | None",
) -> tuple[Tensor, "State"]:
    """``cell.run`` over a sequence, in parts of ``steps`` steps; see ``Cell.forward`` for the rest.

    The result cannot be differentiated twice.
    """
    parameters = [part for part in cell.parameters() if part.requires_grad]
    parts = _Parts(cell, steps, len(x_TBC), first_TB1, mask_TB, noise, parameters)
    y, *after = _InParts.apply(parts, x_TBC, *state, *parameters)
    return y, tuple(after)


class _Parts:
    """Runs any part of one pass; all noise is given, so that it is the same each time."""

    def __init__(self, cell, steps, T, first_TB1, mask_TB, noise, parameters):
        self.cell, self.T, self.parameters = cell, T, parameters
        self.slices = [slice(start, start + steps) for start in range(0, T, steps)]
        self.first_TB1, self.mask_TB, self.noise = first_TB1, mask_TB, noise
        self.autocast = self._autocast(next(cell.parameters()).device.type)

    @staticmethod
    def _autocast(device: str) -> dict:
        return dict(
            device_type=device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            # Weights that were cast where no gradient is kept must not serve where one is.
            cache_enabled=False,
        )

    def __call__(self, here: slice, x_TBC: Tensor, state) -> list[Tensor]:
        """The outputs of a part, and the state after it."""
        first, mask = (None if whole is None else whole[here] for whole in (self.first_TB1, self.mask_TB))
        noise = self.noise
        if noise is not None:
            # A leading 1 is one mask a sequence.
            noise = {name: part if len(part) < self.T else part[here] for name, part in noise.items()}
        with torch.autocast(**self.autocast):
            y, after = self.cell.run(x_TBC, state, first, mask, noise)
        return [y, *after]


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parts: _Parts, x_TBC, *state_and_parameters):
        state = state_and_parameters[: len(parts.cell.state_sizes)]
        ctx.types = [start.dtype for start in state]
        # As within a whole sequence, states of a narrow type are kept wide from part to part.
        state = [start.to(state_dtype(start.dtype)) for start in state]
        # Whatever stays has its place before the work begins, so that all that a part takes comes free again.
        states = [start.new_empty(len(parts.slices), *start.shape) for start in state]
        outputs = None
        for number, here in enumerate(parts.slices):
            for kept, start in zip(states, state, strict=True):
                kept[number] = start
            y, *state = parts(here, x_TBC[here], tuple(kept[number] for kept in states))
            if outputs is None:
                outputs = y.new_empty(len(x_TBC), *y.shape[1:])
            outputs[here] = y
        ctx.set_materialize_grads(False)
        # With the parameters, so that a change of theirs before the backward pass is an error, as elsewhere.
        ctx.save_for_backward(x_TBC, *states, *parts.parameters)
        ctx.parts = parts
        return outputs, *(last.to(dtype) for last, dtype in zip(state, ctx.types, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *dstate):
        parts, (x_TBC, *kept) = ctx.parts, ctx.saved_tensors
        states = kept[: len(dstate)]
        dstate = [None if d is None else d.to(states[0].dtype) for d in dstate]
        needs_x = ctx.needs_input_grad[1]
        dx = torch.zeros_like(x_TBC) if needs_x else None
        # Sums of many parts, in the type of states for the same reason.
        total = [torch.zeros_like(part, dtype=state_dtype(part.dtype)) for part in parts.parameters]
        for number, here in reversed(list(enumerate(parts.slices))):
            x = x_TBC[here].detach().requires_grad_(needs_x)
            state = [starts[number].detach().requires_grad_() for starts in states]
            with torch.enable_grad():
                outputs = parts(here, x, tuple(state))
            dx_part, dstate, found = _gradients(
                outputs, [None if dy is None else dy[here], *dstate], x, state, parts.parameters
            )
            del outputs
            if dx_part is not None:
                dx[here] = dx_part
            for sum_, new in zip(total, found, strict=True):
                if new is not None:
                    sum_ += new
            del dx_part, found
        dstate = [None if d is None else d.to(dtype) for d, dtype in zip(dstate, ctx.types, strict=True)]
        return None, dx, *dstate, *(sum_.to(p.dtype) for sum_, p in zip(total, parts.parameters, strict=True))


def _gradients(outputs, gradients, x, state, parameters):
    """Those of x, of each part of the state and of each parameter; None where there is none."""
    pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None and y.requires_grad]
    sources = [*([x] if x.requires_grad else []), *state, *parameters]
    if not pairs:
        return None, [None] * len(state), [None] * len(parameters)
    ends, given = zip(*pairs, strict=True)
    found = list(torch.autograd.grad(ends, sources, given, allow_unused=True))
    dx = found.pop(0) if x.requires_grad else None
    return dx, found[: len(state)], found[len(state) :]
