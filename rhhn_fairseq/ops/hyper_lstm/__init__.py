"""Whole sequences of HyperLSTM and LN HyperLSTM as one differentiable operation, ``rhhn::hyper_lstm``.

A step consists of one product of h with [weight, weight_hyper], the hypernetwork's LSTM, its embeddings z,
the scaling vectors d of this step from z, and the main cell's point-wise work. The backward pass recomputes
d, so memory holds 4 H numbers a position for the products and none of the 12 H scaling vectors. The backward
pass goes over blocks of steps and reduces the gradients of a block's products to those of the weights.

Shapes: T time, B batch, H hidden, N hyper, Z embedding; gates i, f, g, o in every weight's columns, d in the
order d_h, d_x, b, each for all gates.
"""

from typing import Optional, Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.backends import Plan, graphs, plan_named
from rhhn_fairseq.ops.buffers import state_dtype
from rhhn_fairseq.ops.hyper_lstm.passes import (
    Kept,
    Weights,
    forward_steps,
    make_both_buffers,
    run_backward,
)
from rhhn_fairseq.ops.library import differentiate, operation
from rhhn_fairseq.ops.lstm import GatedNumbers, cast
from rhhn_fairseq.ops.sequence import Masks, Resets


def hyper_lstm(
    g: tuple[Tensor, Tensor],
    state: tuple[Tensor, ...],
    weights: Weights,
    norms: Sequence[Tensor],
    masks: Masks,
    numbers: GatedNumbers,
    previous: bool,
    plan: Plan,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Runs a HyperLSTM over a sequence.

    Args:
        g: x W_x [T, B, 4 H], and the hypernetwork's x W_x + b [T, B, 4 N].
        state: h, c [B, H], e, k [B, N].
        norms: gate_gain, gate_shift, c_gain, c_shift of the main network and of the hypernetwork, or empty.
        masks: padding, and the main network's noise.
        previous: whether z comes from the hypernetwork's state of the previous step.

    Returns:
        outputs [T, B, H]; the last state in the types of ``state``; and without a gradient the hypernetwork's
        states that z was computed from, [T, B, N].
    """
    (gx, g_hyper), (h0, c0, e0, k0) = g, state
    dtype, wide = gx.dtype, state_dtype(gx.dtype)
    y, h, c, e, k, *kept = hyper_lstm_op(
        [gx.contiguous(), g_hyper.contiguous()],
        cast((h0, c0, e0, k0), (dtype, wide, dtype, wide)),
        cast(weights, (*(dtype,) * 5, wide, wide)),
        cast(norms, (wide,) * len(norms)),
        list(masks),
        list(numbers),
        previous,
        plan.name,
    )
    *_, of_hyper, _, _, read = kept
    if previous:
        read = torch.cat((e0.to(dtype).unsqueeze(0), of_hyper[:-1]))
    read = read if read.numel() else of_hyper
    return y, (h.to(h0.dtype), c.to(c0.dtype), e.to(e0.dtype), k.to(k0.dtype)), read


@operation("rhhn::hyper_lstm", graphs.captured)
def hyper_lstm_op(
    g: Sequence[Tensor],
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    norms: Sequence[Tensor],
    masks: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    previous: bool,
    plan: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:
    """See ``hyper_lstm``; c, k, norms and the weights from weight_d on in the state type, all contiguous.

    Returns:
        outputs [T, B, H], the last h, c, e and k; and the fields of ``Kept``.
    """
    (gx, g_hyper), (h0, c0, e0, k0), w = g, state, Weights(*weights)
    masks, how, rows = Masks(*masks), plan_named(plan), gx.new_empty
    (T, B, _), H, N = gx.shape, h0.shape[-1], e0.shape[-1]
    y = rows(T, B, H)
    h = y if masks.mask is None else torch.empty_like(y)
    c, k = c0.new_empty(T, B, H), k0.new_empty(T, B, N)
    of_both = rows(T, B, 4 * (H + N)), h, c, rows(T, B, 4 * N), rows(T, B, N), k, rows(T, B, len(w.bias_z))
    kept = Kept(*of_both, rows(0))
    # The weight of z reads e itself, not what is left after a reset.
    e = None if masks.resets is None else torch.empty_like(kept.e)
    outputs = None if h is y else (y, e)
    main, hyper = make_both_buffers(kept, state, norms, masks, GatedNumbers(*numbers), (w, gx), outputs)
    # For a step or two, as in decoding, copying the weights side by side costs more than a second product.
    merged = torch.cat([w.weight, w.weight_hyper], dim=1) if T >= 4 else None
    if merged is not None and how.fits_one_call(
        T, B, merged.numel() + w.weight_e.numel() + w.weight_z.numel(), y.dtype
    ):
        panels = []
        for matrix in (merged, w.weight_e, w.weight_z):
            panels.append(native.pack([matrix], "forward"))
        vectors = w.bias_z, g_hyper
        run = native.hyper_lstm_sequence((main, None), (hyper, None), panels, vectors, previous)
    else:
        run = forward_steps(kept, w, merged, previous, how, main, hyper, g_hyper)
    Resets(masks.resets).forward(run, 0, T, (h, c, kept.e, k))
    last = h[-1].clone(), c[-1].clone(), kept.e[-1].clone(), k[-1].clone()
    kept = kept._replace(h=h if masks.mask is not None else rows(0), read=rows(0) if e is None else e)
    return y, *last, *kept


@torch.library.register_fake(hyper_lstm_op)
def _(g, state, weights, norms, masks, *_):
    (gx, g_hyper), (h0, c0, e0, k0), w = g, state, Weights(*weights)
    (T, B, _), H, N = gx.shape, h0.shape[-1], e0.shape[-1]
    y, u = gx.new_empty(T, B, H), gx.new_empty(T, B, 4 * (H + N))
    c, k = c0.new_empty(T, B, H), k0.new_empty(T, B, N)
    h = gx.new_empty(0) if masks[0] is None else torch.empty_like(y)
    e, z = gx.new_empty(T, B, N), gx.new_empty(T, B, len(w.bias_z))
    read = gx.new_empty(0) if Masks(*masks).resets is None else torch.empty_like(e)
    last = (torch.empty_like(tensor) for tensor in state)
    return y, *last, u, h, c, torch.empty_like(g_hyper), e, k, z, read


@operation("rhhn::hyper_lstm_backward", graphs.captured)
def hyper_lstm_backward(
    gradients: Sequence[Optional[Tensor]],
    kept: Sequence[Tensor],
    g: Sequence[Tensor],
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    norms: Sequence[Tensor],
    masks: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    previous: bool,
    plan: str,
) -> list[Tensor]:
    """The backward pass of ``hyper_lstm_op``.

    Args:
        gradients: of the outputs and of the last h, c, e and k. kept: the fields of ``Kept``, with h.
        g: gx, and a in place of the hypernetwork's input, which a includes.

    Returns:
        gradients of gx, g_hyper, h0, c0, e0, k0, the weights and norms.
    """
    groups = state, Weights(*weights), norms, Masks(*masks), GatedNumbers(*numbers)
    return run_backward(gradients, Kept(*kept), g[0], *groups, previous, plan_named(plan))


def _keep(inputs, output):
    ((gx, _), *others), kept = inputs, Kept(*output[5:])
    # Without a mask the outputs are the states and are not stored twice.
    kept = kept._replace(h=output[0] if kept.h.numel() == 0 else kept.h)
    return ([gx, kept.a], *others), list(kept)


differentiate(hyper_lstm_op, hyper_lstm_backward, outputs=5, differentiable=4, keep=_keep)
