"""Whole sequences of LSTM and LN LSTM as one differentiable operation, ``rhhn::lstm``.

A step consists of matrix products, into buffers of the whole sequence, and one call of the point-wise work.
The forward pass stores the products u and the states. The backward pass recomputes the gates from them and
collects the gradients of u in a buffer, so the gradient of a weight is one product over all steps. All noise
is passed in as masks. The operation cannot be differentiated twice.

Shapes: T time, B batch, H hidden; gates i, f, g, o in every weight's columns.
"""

from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops.backends import Plan, graphs, plan_named, pointwise
from rhhn_fairseq.ops.buffers import Gated, GatedGradients, state_dtype
from rhhn_fairseq.ops.library import differentiate, operation
from rhhn_fairseq.ops.matmul.gemm import PackedWeight
from rhhn_fairseq.ops.regularise import LAYER_NORM_EPS
from rhhn_fairseq.ops.sequence import (
    Masks,
    Resets,
    operand_blocks,
    or_zeros,
    previous_states,
    through_recurrence,
    weight_gradient,
)

SUMS = 14
"""Gradients that the point-wise work sums over rows, in units of H; see ``buffers.Gated.sums``."""


class GatedNumbers(NamedTuple):
    """The scalars of a pass.

    Attributes:
        keep_scale: factor of a kept unit of the update.
        zone_h_rate, zone_c_rate: the share of the old value that zoneout keeps if there is no mask.
        epsilon: added to a variance in layer normalisation.
    """

    forget_bias: float
    keep_scale: float = 1.0
    zone_h_rate: float = 0.0
    zone_c_rate: float = 0.0
    epsilon: float = LAYER_NORM_EPS


def lstm(
    g: Tensor,
    state: tuple[Tensor, Tensor],
    weight: Tensor,
    norm: Sequence[Tensor],
    masks: Masks,
    numbers: GatedNumbers,
    plan: Plan,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Runs an LSTM over a sequence.

    Args:
        g: x W_x + b [T, B, 4 H]. state: h and c [B, H]. weight: W_h [H, 4 H].
        norm: gate_gain, gate_shift [4 H], c_gain, c_shift [H], or empty.

    Returns:
        outputs [T, B, H], and the last state in the types of ``state``.
    """
    dtype, wide, (h0, c0) = g.dtype, state_dtype(g.dtype), state
    y, h, c, *_ = lstm_op(
        g.contiguous(),
        cast(state, (dtype, wide)),
        weight.to(dtype),
        cast(norm, (wide,) * len(norm)),
        list(masks),
        list(numbers),
        plan.name,
    )
    return y, (h.to(h0.dtype), c.to(c0.dtype))


def cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Casts tensors to these types and makes them contiguous."""
    result = []
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        result.append(tensor.to(dtype).contiguous())
    return result


@operation("rhhn::lstm", graphs.captured)
def lstm_op(
    g: Tensor,
    state: Sequence[Tensor],
    weight: Tensor,
    norm: Sequence[Tensor],
    masks: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``lstm``; c and norm in the state type, all contiguous, ``masks`` the fields of ``Masks``,
    ``numbers`` those of ``GatedNumbers``.

    Returns:
        outputs [T, B, H], the last h and c; and for the backward pass u [T, B, 4 H], c of all steps, and
        with a mask h of all steps.
    """
    (h0, c0), masks, how = state, Masks(*masks), plan_named(plan)
    (T, B, _), H = g.shape, h0.shape[-1]
    y, u = g.new_empty(T, B, H), torch.empty_like(g)
    h = y if masks.mask is None else torch.empty_like(y)
    c = c0.new_empty(T, B, H)
    further = {"gx": g} if masks.mask is None else {"gx": g, "y": y}
    buffers = make_buffers((u, h, c), state, norm, masks, GatedNumbers(*numbers), **further)
    run = pointwise.many_steps(how, buffers, None, [weight])
    if run is None:
        step = pointwise.step(how, buffers)
        recurrent = PackedWeight(weight, T, B, how.gemm)
        rows = list(zip(g.unbind(0), u.unbind(0), previous_states(h0, h), strict=True))

        def run(start: int, stop: int) -> None:
            for t in range(start, stop):
                g_t, u_t, h_t = rows[t]
                recurrent.product(h_t if masks.gal is None else h_t * masks.gal, u_t, g_t)
                step(t)

    Resets(masks.resets).forward(run, 0, T, (h, c))
    return y, h[-1].clone(), c[-1].clone(), u, c, (g.new_empty(0) if masks.mask is None else h)


def make_buffers(
    sequence: Sequence[Tensor],
    state: Sequence[Tensor],
    norm: Sequence[Tensor],
    masks: Masks,
    numbers: GatedNumbers,
    **further: Any,
) -> Gated:
    """Returns the buffers that forward and backward share; see ``buffers.Gated`` for the names.

    Args:
        sequence: u, h and c. state: h0 and c0. further: gx, y, and those of a hypernetwork, by name.
    """
    (u, h, c), (h0, c0) = sequence, state
    if norm:
        further |= dict(zip(("gate_gain", "gate_shift", "c_gain", "c_shift"), norm, strict=True))
    further |= masks.of(Gated) | numbers._asdict()
    return Gated(u=u, h0=h0, c0=c0, h=h, c=c, **further)


@torch.library.register_fake(lstm_op)
def _(g, state, weight, norm, masks, numbers, *_):
    (h0, c0), (T, B, _) = state, g.shape
    y, c = g.new_empty(T, B, h0.shape[-1]), c0.new_empty(T, B, h0.shape[-1])
    h = g.new_empty(0) if masks[0] is None else torch.empty_like(y)
    return y, torch.empty_like(h0), torch.empty_like(c0), torch.empty_like(g), c, h


@operation("rhhn::lstm_backward", graphs.captured)
def lstm_backward(
    gradients: Sequence[Optional[Tensor]],
    kept: Sequence[Tensor],
    u: Tensor,
    state: Sequence[Tensor],
    weight: Tensor,
    norm: Sequence[Tensor],
    masks: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    plan: str,
) -> list[Tensor]:
    """The backward pass of ``lstm_op``.

    Args:
        gradients: of the outputs and of the last h and c. kept: h and c.

    Returns:
        gradients of g, h0, c0, weight and norm.
    """
    (dy, *last), how = gradients, plan_named(plan)
    buffers = make_buffers((u, *kept), state, norm, Masks(*masks), GatedNumbers(*numbers))
    T, B, _ = buffers.c.shape
    grads = make_gradients(how, buffers, dy, last, torch.empty_like(u))
    run = pointwise.many_steps(how, buffers, grads, [weight])
    if run is None:
        step = pointwise.step(how, buffers, grads)
        recurrent = PackedWeight(weight, T, B, how.gemm, transpose=True)
        du = grads.du.unbind(0)

        def run(start: int, stop: int) -> None:
            for t in reversed(range(start, stop)):
                step(t)
                recurrent.product(du[t], grads.dh)
                through_recurrence(grads.dh, buffers.gal, buffers.share, t)

    Resets(buffers.resets).backward(run, 0, T, (grads.dh, grads.dh_direct, grads.dc))
    dweight = weight_gradient(operand_blocks(buffers.h0, buffers.h, buffers.gal), grads.du, how.gemm)
    _, *dnorm = split_sums(grads)
    return [grads.du, state_gradient(grads), grads.dc, dweight, *(dnorm if norm else ())]


def make_gradients(
    plan: Plan,
    buffers: Gated,
    dy: Tensor | None,
    last: Sequence[Tensor | None],
    du: Tensor,
    **further: Tensor,
) -> GatedGradients:
    """Returns the gradients with which the backward pass of ``buffers`` begins.

    Args:
        dy: gradient of the outputs. last: gradients of the last h and c. du: where that of u is written.
        further: those of a hypernetwork, by name.
    """
    zoned = buffers.zone_h is not None or buffers.zone_h_rate != 0.0 or buffers.mask is not None
    return GatedGradients(
        dy=None if dy is None else dy.contiguous(),
        dh=or_zeros(last[0], buffers.h0),
        dc=or_zeros(last[1], buffers.c0),
        du=du,
        sums=pointwise.gradient_sums(plan, [SUMS * buffers.c0.shape[-1]], buffers.c0),
        dh_direct=torch.zeros_like(buffers.c0) if zoned else None,
        **further,
    )


def state_gradient(grads: GatedGradients) -> Tensor:
    """Returns the gradient of h0 after a backward pass."""
    return grads.dh if grads.dh_direct is None else grads.dh + grads.dh_direct.to(grads.dh.dtype)


def split_sums(grads: GatedGradients) -> list[Tensor]:
    """Returns the gradients of the bias, gate_gain, gate_shift, c_gain and c_shift after a backward pass."""
    H = grads.dc.shape[-1]
    gain, shift, bias, *of_c = grads.sums.sum(0).split((4 * H, 4 * H, 4 * H, H, H))
    # An operation's results must not share memory.
    return [piece.clone() for piece in (bias, gain, shift, *of_c)]


def _keep(inputs, output):
    (_, *others), (y, _, _, u, c, h) = inputs, output
    return (u, *others), [y if h.numel() == 0 else h, c]


differentiate(lstm_op, lstm_backward, outputs=3, differentiable=4, keep=_keep)
