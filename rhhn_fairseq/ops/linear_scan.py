"""Recurrences that are linear in their state, for a whole sequence, as the operation ``rhhn::linear_scan``.

Shapes: T time, B batch, H hidden.
"""

import torch
from torch import Tensor

from rhhn_fairseq.ops.library import operation


@operation("rhhn::linear_scan")
def linear_scan(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Computes ``h_t = a_t h_{t-1} + b_t``: step by step on a CPU, in log2(T) rounds elsewhere.

    Args:
        a: factors [T, B, H], at most 1 in magnitude. b: terms [T, B, H]. h: the state before the first step,
            [B, H].

    Returns:
        all states [T, B, H].
    """
    return scan_in_order(a, b, h) if a.device.type == "cpu" else scan_by_doubling(a, b, h)


@torch.library.register_fake(linear_scan)
def _(a, b, h):
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def scan_in_order(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Takes T products and sums of [B, H]."""
    states = torch.empty_like(b, memory_format=torch.contiguous_format)
    for a_t, b_t, state in zip(a.unbind(0), b.unbind(0), states.unbind(0), strict=True):
        torch.addcmul(b_t, a_t, h, out=state)
        h = state
    return states


def scan_by_doubling(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """Takes log2(T) products and sums of [T, B, H] (Hillis and Steele 1986)."""
    states = torch.cat((torch.addcmul(b[:1], a[:1], h), b[1:]))
    factors, distance = a, 1
    while distance < len(states):
        # A factor and a state cover ``distance`` steps, and twice as many after this round.
        later = torch.addcmul(states[distance:], factors[distance:], states[:-distance])
        states = torch.cat((states[:distance], later))
        factors = torch.cat((factors[:distance], factors[distance:] * factors[:-distance]))
        distance *= 2
    return states


def _context(ctx, inputs, output):
    a, _, h = inputs
    ctx.save_for_backward(a, h, output)


def _gradients(ctx, gradient):
    """Runs the same recurrence backward in time, with the factor of the following step."""
    a, h, states = ctx.saved_tensors
    following = torch.cat((a[1:], torch.zeros_like(a[:1])))
    db = linear_scan(following.flip(0), gradient.flip(0), torch.zeros_like(h)).flip(0)
    before = torch.cat((h.unsqueeze(0), states[:-1]))
    return db * before, db, db[0] * a[0]


torch.library.register_autograd(linear_scan, _gradients, setup_context=_context)
