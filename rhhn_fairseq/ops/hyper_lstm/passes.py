"""The forward and the backward pass of a HyperLSTM over a sequence, for ``hyper_lstm``.

Shapes: T time, B batch, H hidden, N hyper, Z embedding; gates i, f, g, o in every weight's columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.backends import Plan, pointwise
from rhhn_fairseq.ops.buffers import Gated, GatedGradients
from rhhn_fairseq.ops.lstm import (
    GatedNumbers,
    make_buffers,
    make_gradients,
    split_sums,
    state_gradient,
)
from rhhn_fairseq.ops.matmul.gemm import PackedWeight
from rhhn_fairseq.ops.sequence import (
    Masks,
    Resets,
    Run,
    block_steps,
    operand_blocks,
    previous_states,
    through_recurrence,
    weight_gradient,
)


class Weights(NamedTuple):
    """The parameters of both networks except those of normalisation.

    Attributes:
        weight: W_h [H, 4 H]. weight_hyper: from h to the hypernetwork [H, 4 N].
        weight_e: the hypernetwork's recurrent matrix [N, 4 N].
        weight_z: [N, 12 Z] with bias_z [12 Z].
        weight_d: [12, Z, H] and bias: b_0 [4, H], state type.
    """

    weight: Tensor
    weight_hyper: Tensor
    weight_e: Tensor
    weight_z: Tensor
    bias_z: Tensor
    weight_d: Tensor
    bias: Tensor


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass.

    Attributes:
        u: products of h with [weight, weight_hyper], [T, B, 4 (H + N)].
        h, c: all states of the main network, [T, B, H]; h is empty if the outputs are the same.
        a: sums of the hypernetwork's gates, [T, B, 4 N]. e, k: its states, [T, B, N]. z: [T, B, 12 Z].
        read: e before resets cleared it; empty without resets.
    """

    u: Tensor
    h: Tensor
    c: Tensor
    a: Tensor
    e: Tensor
    k: Tensor
    z: Tensor
    read: Tensor


def make_both_buffers(
    kept: Kept,
    state: Sequence[Tensor],
    norms: Sequence[Tensor],
    masks: Masks,
    numbers: GatedNumbers,
    scaled: tuple[Weights, Tensor],
    y: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Gated, Gated]:
    """Returns the buffers of the main network and of the hypernetwork; the latter has no noise of its own.

    Args:
        scaled: the weights and gx. y: the outputs of both networks, in a forward pass with a mask; those of
            the hypernetwork may be missing.
    """
    u, h, c, a, e, k, z, _ = kept
    half, plain = len(norms) // 2, GatedNumbers(numbers.forget_bias, epsilon=numbers.epsilon)
    (weights, gx), outputs = scaled, {}
    further = {"gx": gx, "z": z, "weight_d": weights.weight_d, "bias": weights.bias}
    if y is not None:
        further["y"], outputs["y"] = y[0], torch.empty_like(e) if y[1] is None else y[1]
    of_h = u[:, :, : 4 * h.shape[-1]]
    of_hyper = Masks(masks.mask, resets=masks.resets)
    main = make_buffers((of_h, h, c), state[:2], norms[:half], masks, numbers, **further)
    return main, make_buffers((a, e, k), state[2:], norms[half:], of_hyper, plain, **outputs)


def forward_steps(
    kept: Kept,
    weights: Weights,
    merged: Tensor | None,
    previous: bool,
    plan: Plan,
    main: Gated,
    hyper: Gated,
    g_hyper: Tensor,
) -> Run:
    """Returns a function that runs some steps forward: the products, and a call for each network.

    Args:
        merged: weight and weight_hyper side by side; None for a product with each.
        main, hyper: the buffers of both networks. g_hyper: the hypernetwork's x W_x + b.
    """
    (T, B, H), N = kept.c.shape, kept.e.shape[-1]
    sides = kept.u.split((4 * H, 4 * N), dim=-1)
    from_h = None if merged is None else PackedWeight(merged, T, B, plan.gemm)
    from_e, to_z = (PackedWeight(matrix, T, B, plan.gemm) for matrix in (weights.weight_e, weights.weight_z))
    main_step, hyper_step = pointwise.step(plan, main), pointwise.step(plan, hyper)
    rows = list(
        zip(
            *(tensor.unbind(0) for tensor in (kept.u, *sides, g_hyper, hyper.u, hyper.h, kept.z)),
            previous_states(main.h0, main.h),
            previous_states(hyper.h0, hyper.h),
            strict=True,
        )
    )

    def run(start: int, stop: int) -> None:
        for t in range(start, stop):
            u_t, main_t, hyper_t, g_t, a_t, e_new, z_t, h_t, e_t = rows[t]
            if main.gal is not None:
                h_t = h_t * main.gal
            if from_h is not None:
                from_h.product(h_t, u_t)
            else:
                torch.mm(h_t, weights.weight, out=main_t)
                torch.mm(h_t, weights.weight_hyper, out=hyper_t)
            torch.add(g_t, hyper_t, out=a_t)
            from_e.product(e_t, a_t, a_t)
            hyper_step(t)
            to_z.product(e_t if previous else e_new, z_t, weights.bias_z)
            main_step(t)

    return run


def run_backward(
    gradients: Sequence[Tensor | None],
    kept: Kept,
    gx: Tensor,
    state: Sequence[Tensor],
    weights: Weights,
    norms: Sequence[Tensor],
    masks: Masks,
    numbers: GatedNumbers,
    previous: bool,
    plan: Plan,
) -> list[Tensor]:
    """Runs the backward pass, one block of steps after another, from the last to the first; see
    ``hyper_lstm_backward``."""
    (T, B, H), N, (dy, *last) = kept.c.shape, kept.e.shape[-1], gradients
    widths = (4 * H, 4 * N)
    main, hyper = make_both_buffers(kept, state, norms, masks, numbers, (weights, gx))
    steps = block_steps(T, B, kept.u.dtype, kept.c.dtype)
    du = kept.u.new_empty(steps, *kept.u.shape[1:])
    du_main, du_hyper = du.split(widths, dim=-1)
    dgx, dg_hyper, dz = (torch.empty_like(tensor) for tensor in (gx, kept.a, kept.z))
    dweight_d = pointwise.gradient_sums(plan, weights.weight_d.shape, main.c0)
    from_h = torch.cat(weights[:2], dim=1)
    of_main = make_gradients(plan, main, dy, last[:2], du_main, dgx=dgx, dz=dz, dweight_d=dweight_d)
    of_hyper = make_gradients(plan, hyper, None, last[2:], du_hyper)
    matrices = from_h, weights.weight_e, weights.weight_z
    run = _backward_steps((main, of_main), (hyper, of_hyper), matrices, du, previous, plan)
    resets, of_state = Resets(masks.resets), []
    for grads in (of_main, of_hyper):
        of_state += [grads.dh, grads.dh_direct, grads.dc]
    dmerged, dweight_e = torch.empty_like(from_h), torch.empty_like(weights.weight_e)
    for start in reversed(range(0, T, steps)):
        stop = min(start + steps, T)
        resets.backward(run, start, stop, of_state)
        block, add = slice(start, stop), stop < T
        du_block, de_block = du[: stop - start], du_hyper[: stop - start]
        dg_hyper[block] = de_block
        h_blocks = operand_blocks(state[0], kept.h, masks.gal, block)
        e_blocks = operand_blocks(state[2], kept.e, None, block)
        weight_gradient(h_blocks, du_block, plan.gemm, dmerged, add)
        weight_gradient(e_blocks, de_block, plan.gemm, dweight_e, add)
    read = [kept.read if kept.read.numel() else kept.e]
    if previous:
        read = operand_blocks(state[2], kept.e, None)
    (dbias, *dnorm), (_, *dhyper_norm) = split_sums(of_main), split_sums(of_hyper)
    # An operation's results must not share memory.
    sides = dmerged.split(widths, dim=1)
    dweight, dweight_hyper = (side.clone(memory_format=torch.contiguous_format) for side in sides)
    return [
        dgx,
        dg_hyper,
        state_gradient(of_main),
        of_main.dc,
        state_gradient(of_hyper),
        of_hyper.dc,
        dweight,
        dweight_hyper,
        dweight_e,
        weight_gradient(read, dz, plan.gemm),
        dz.sum((0, 1)),
        of_main.dweight_d.sum(0),
        dbias.view(4, H),
        *((*dnorm, *dhyper_norm) if norms else ()),
    ]


def _backward_steps(
    main: tuple[Gated, GatedGradients],
    hyper: tuple[Gated, GatedGradients],
    matrices: Sequence[Tensor],
    du_KBU: Tensor,
    previous: bool,
    plan: Plan,
) -> Run:
    """Returns a function that runs some steps backward: in one call, or step by step with the products and a
    call for each network.

    Args:
        main, hyper: the buffers of each network, and their gradients.
        matrices: that of h, weight_e and weight_z.
        du_KBU: gradients of a block's products of h with the first of ``matrices``.
    """
    (buffers, grads), (_, inner) = main, hyper
    (T, B, _), K = buffers.c.shape, len(du_KBU)
    numbers = sum(matrix.numel() for matrix in matrices)
    if plan.fits_one_call(K, B, numbers, buffers.u.dtype):
        panels = [native.pack([matrix], "backward") for matrix in matrices]
        return native.hyper_lstm_sequence(main, hyper, panels, (), previous)
    to_h, to_e, from_z = (PackedWeight(matrix, T, B, plan.gemm, transpose=True) for matrix in matrices)
    main_step, hyper_step = pointwise.step(plan, *main), pointwise.step(plan, *hyper)
    du, du_inner, dz = du_KBU.unbind(0), inner.du.unbind(0), grads.dz.unbind(0)

    def run(start: int, stop: int) -> None:
        for t in reversed(range(start, stop)):
            main_step(t)
            # A step's gradient of z becomes that of the hypernetwork's sums and state.
            if not previous:
                from_z.product(dz[t], inner.dh, inner.dh)
            hyper_step(t)
            to_e.product(du_inner[t % K], inner.dh)
            if previous:
                from_z.product(dz[t], inner.dh, inner.dh)
            to_h.product(du[t % K], grads.dh)
            through_recurrence(grads.dh, buffers.gal, buffers.share, t)

    return run
