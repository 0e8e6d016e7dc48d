"""Point-wise work of time steps by backend: single steps, or many steps in one call."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops import native, triton
from rhhn_fairseq.ops.backends import Plan, aten
from rhhn_fairseq.ops.buffers import Buffers, Gradients

IMPLEMENTATIONS = {"native": native, "aten": aten, "triton": triton}


def step(plan: Plan, buffers: Buffers, gradients: Gradients | None = None) -> Callable[[int], None]:
    """Returns a function that runs one step of ``buffers``, backward with gradients; of a highway one layer
    of a time step, number ``t L + l``."""
    return IMPLEMENTATIONS[plan.backend].step(buffers, gradients)


def many_steps(
    plan: Plan, buffers: Buffers, gradients: Gradients | None, weights: Sequence[Tensor]
) -> Callable[[int, int], None] | None:
    """Returns a function that runs some time steps in one call, with their products, or None if there is
    none; see ``native.many_steps``."""
    T, B = buffers.u.shape[-3:-1]
    if not plan.fits_one_call(T, B, sum(weight.numel() for weight in weights), buffers.u.dtype):
        return None
    return native.many_steps(buffers, gradients, weights)


def gradient_sums(plan: Plan, shape: Sequence[int], like: Tensor) -> Tensor:
    """Returns zeros [slots, *shape] for a parameter's gradient, with a slot for each thread or program.

    Args:
        shape: the parameter's.
        like: a state, [B, H].
    """
    slots = {"native": torch.get_num_threads(), "aten": 1}.get(plan.backend) or triton.slots(shape, like)
    return like.new_zeros(slots, *shape)
