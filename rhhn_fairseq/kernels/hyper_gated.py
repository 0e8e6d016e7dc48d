"""Whole sequences of HyperLSTM and LN HyperLSTM as one differentiable operation, ``rhhn::hyper_lstm``.

A step: one product of h with [W_h, W of the hypernetwork's h], the hypernetwork's LSTM, its z and from them
the scaling vectors d of this step only, and the main cell's point-wise work. d is made again in the backward
pass, so that memory holds 4 H numbers a position for the products and none for the 12 H scaling vectors. The
backward pass goes over parts of a sequence; the gradients of a part's products end in those of the weights.

Shapes: T time, B batch, H hidden, N hyper, Z embedding; gates i, f, g, o in every weight's columns, d in the
order d_h, d_x, b, each for all gates.
"""

import functools
from dataclasses import astuple
from typing import Sequence

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Noise, State
from rhhn_fairseq.cells.hyper_lstm import HyperLSTM
from rhhn_fairseq.kernels import graphs, native, pointwise
from rhhn_fairseq.kernels.buffers import Gated, state_dtype
from rhhn_fairseq.kernels.gated import (
    SUMS,
    Numbers,
    Randomness,
    add_gradients,
    fields_of,
    hand_gradients,
    lstm_buffers,
    norm_of,
    split_sums,
    whole_dh,
)
from rhhn_fairseq.kernels.matmul import Factor
from rhhn_fairseq.kernels.products import (
    before,
    part_steps,
    seen,
    through_recurrence,
    weight_gradient,
)


@torch.library.custom_op("rhhn::hyper_lstm", mutates_args=())
@graphs.captured
def hyper_lstm(
    gx: Tensor,
    g_hyper: Tensor,
    h0: Tensor,
    c0: Tensor,
    e0: Tensor,
    k0: Tensor,
    weight: Tensor,
    weight_hyper: Tensor,
    weight_e: Tensor,
    weight_z: Tensor,
    bias_z: Tensor,
    weight_d: Tensor,
    bias: Tensor,
    norm: Sequence[Tensor],
    hyper_norm: Sequence[Tensor],
    mask: Tensor | None,
    gal: Tensor | None,
    keep: Tensor | None,
    zone_h: Tensor | None,
    zone_c: Tensor | None,
    h_share: Tensor | None,
    c_share: Tensor | None,
    numbers: Sequence[float],
    previous: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A HyperLSTM over a sequence.

    Args:
        gx: x W_x [T, B, 4 H]. g_hyper: the hypernetwork's x W_x + b [T, B, 4 N].
        h0: [B, H]. e0: [B, N]. c0 and k0: the same, state type.
        weight: W_h [H, 4 H]. weight_hyper: from h to the hypernetwork [H, 4 N]. weight_e: its recurrent
            matrix [N, 4 N]. weight_z: [N, 12 Z] with bias_z [12 Z].
        weight_d: [12, Z, H] and bias: b_0 [4, H], state type.
        norm, hyper_norm: gate_gain, gate_shift, c_gain, c_shift of either network, state type, or nothing.
        mask ... backend: as for ``gated.lstm``; the noise is the main network's.
        previous: z comes from the hypernetwork's state of the step before.

    Returns:
        outputs [T, B, H], last h, c, e and k; and for the backward the products u with [weight,
        weight_hyper], all c, all h with a mask, and of the hypernetwork the gates' sums, e and k, and z.
    """
    T, B, _ = gx.shape
    (H, N), rows = (h0.shape[-1], e0.shape[-1]), gx.new_empty
    y, u = rows(T, B, H), rows(T, B, 4 * (H + N))
    a_hyper, e, z = rows(T, B, 4 * N), rows(T, B, N), rows(T, B, weight_z.shape[1])
    h = y if mask is None else torch.empty_like(y)
    c, k = c0.new_empty(T, B, H), k0.new_empty(T, B, N)
    main, hyper = _buffers(
        (u[:, :, : 4 * H], h0, c0, h, c, norm),
        (a_hyper, e0, k0, e, k, hyper_norm),
        mask,
        Randomness(gal, keep, zone_h, zone_c, h_share, c_share),
        Numbers(*numbers),
    )
    main.gx, main.z, main.weight_d, main.bias = gx, z, weight_d, bias
    if mask is not None:
        main.y, hyper.y = y, torch.empty_like(e)
    # For a step or two, as in decoding, copying the weights side by side costs more than a second product.
    merged = torch.cat([weight, weight_hyper], dim=1) if T >= 4 else None
    if merged is None or not pointwise.hyper_lstm_sequence(
        *(backend, main, hyper, "forward", g_hyper),
        *(native.Laid((merged, weight_e, weight_z), "forward"), bias_z, gal, None, previous),
    ):
        weights = weight, weight_hyper, merged, weight_e, weight_z, bias_z
        _run_forward(main, hyper, u, g_hyper, weights, gal, previous, backend)
    last = (part[-1].clone() for part in (h, c, e, k))
    return y, *last, u, c, (rows(0) if mask is None else h), a_hyper, e, k, z


def _run_forward(main: Gated, hyper: Gated, u, g_hyper, weights, gal, previous, backend) -> None:
    """All steps of the forward pass, the products and a call of either network for each."""
    weight, weight_hyper, merged, weight_e, weight_z, bias_z = weights
    main_step = pointwise.gated(backend, main, "forward")
    (T, B, H), N = main.h.shape, hyper.h.shape[-1]
    from_h = None if merged is None else Factor(merged, T, B, backend)
    sides = u.split((4 * H, 4 * N), dim=-1)
    inner = pointwise.hypernetwork(
        backend, hyper, main, "forward", weight_e, weight_z, bias_z, g_hyper, sides[1], previous
    )
    hyper_step = pointwise.gated(backend, hyper, "forward")
    from_e, to_z = Factor(weight_e, T, B, backend), Factor(weight_z, T, B, backend)
    every_step = zip(
        u.unbind(0),
        sides[0].unbind(0),
        sides[1].unbind(0),
        g_hyper.unbind(0),
        hyper.u.unbind(0),
        main.z.unbind(0),
        before(main.h0, main.h),
        before(hyper.h0, hyper.h),
        hyper.h.unbind(0),
        strict=True,
    )
    for t, (u_t, main_t, side_t, g_t, a_t, z_t, h_t, e_t, e_new) in enumerate(every_step):
        if gal is not None:
            h_t = h_t * gal
        if from_h is not None:
            from_h.product(h_t, u_t)
        else:
            torch.mm(h_t, weight, out=main_t)
            torch.mm(h_t, weight_hyper, out=side_t)
        if inner is not None:
            inner(t)
        else:
            torch.add(g_t, side_t, out=a_t)
            from_e.product(e_t, a_t, a_t)
            hyper_step(t)
            to_z.product(e_t if previous else e_new, z_t, bias_z)
        main_step(t)


def _buffers(main, hyper, mask, randomness: Randomness, numbers: Numbers) -> tuple[Gated, Gated]:
    """The buffers of both networks; the hypernetwork has no noise of its own."""
    plain = Numbers(numbers.forget_bias, 1.0, 0.0, 0.0)
    return (
        lstm_buffers(*main, mask, randomness, numbers),
        lstm_buffers(*hyper, mask, Randomness(), plain),
    )


@hyper_lstm.register_fake
def _(gx, g_hyper, h0, c0, e0, k0, weight, weight_hyper, weight_e, weight_z, *rest):
    mask, (T, B, _), H, N = rest[5], gx.shape, h0.shape[-1], e0.shape[-1]
    last = (torch.empty_like(part) for part in (h0, c0, e0, k0))
    y, u = gx.new_empty(T, B, H), gx.new_empty(T, B, 4 * (H + N))
    c, k = c0.new_empty(T, B, H), k0.new_empty(T, B, N)
    h = gx.new_empty(0) if mask is None else torch.empty_like(y)
    e, z = gx.new_empty(T, B, N), gx.new_empty(T, B, weight_z.shape[1])
    return y, *last, u, c, h, torch.empty_like(g_hyper), e, k, z


@torch.library.custom_op("rhhn::hyper_lstm_backward", mutates_args=())
@graphs.captured
def hyper_lstm_backward(
    dy: Tensor | None,
    dh_last: Tensor | None,
    dc_last: Tensor | None,
    de_last: Tensor | None,
    dk_last: Tensor | None,
    u: Tensor,
    h: Tensor,
    c: Tensor,
    a_hyper: Tensor,
    e: Tensor,
    k: Tensor,
    z: Tensor,
    gx: Tensor,
    h0: Tensor,
    c0: Tensor,
    e0: Tensor,
    k0: Tensor,
    weight: Tensor,
    weight_hyper: Tensor,
    weight_e: Tensor,
    weight_z: Tensor,
    weight_d: Tensor,
    bias: Tensor,
    norm: Sequence[Tensor],
    hyper_norm: Sequence[Tensor],
    mask: Tensor | None,
    gal: Tensor | None,
    keep: Tensor | None,
    zone_h: Tensor | None,
    zone_c: Tensor | None,
    h_share: Tensor | None,
    c_share: Tensor | None,
    numbers: Sequence[float],
    previous: bool,
    backend: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:
    """Gradients from those of the outputs.

    Returns:
        those of gx, g_hyper, h0, c0, e0, k0, [weight, weight_hyper], weight_e, weight_z, bias_z and
        weight_d, and the sums of ``buffers.Gated`` of either network.
    """
    (T, B, H), N = h.shape, e0.shape[-1]
    dgx, dg_hyper, dz = torch.empty_like(gx), torch.empty_like(a_hyper), torch.empty_like(z)
    main = hyper = None
    dmerged, dweight_e = weight.new_empty(H, 4 * (H + N)), torch.empty_like(weight_e)
    weights = torch.cat([weight, weight_hyper], dim=1), weight_e, weight_z
    factors, near = _Factors(weights, T, B, backend), native.Laid(weights, "backward")
    randomness = Randomness(gal, keep, zone_h, zone_c, h_share, c_share)
    steps = part_steps(T, B, u.dtype, c0.dtype)
    whole_du = u.new_empty(steps, *u.shape[1:])
    for start in reversed(range(0, T, steps)):
        part = slice(start, start + steps)
        states = ((h0, h), (c0, c), (e0, e), (k0, k))
        h_start, c_start, e_start, k_start = (rest[start - 1] if start else first for first, rest in states)
        after, noise = (main, hyper), randomness.part(part)
        main, hyper = _buffers(
            (u[part, :, : 4 * H], h_start, c_start, h[part], c[part], norm),
            (a_hyper[part], e_start, k_start, e[part], k[part], hyper_norm),
            None if mask is None else mask[part],
            noise,
            Numbers(*numbers),
        )
        if after[0] is None:
            add_gradients(main, None, dh_last, dc_last, backend)
            add_gradients(hyper, None, de_last, dk_last, backend)
            main.dweight_d = pointwise.sums_of(backend, weight_d.shape, c0)
        else:
            hand_gradients(after[0], main)
            hand_gradients(after[1], hyper)
        main.dy = None if dy is None else dy[part].contiguous()
        main.gx, main.z, main.weight_d, main.bias = gx[part], z[part], weight_d, bias
        main.dgx, main.dz, du = dgx[part], dz[part], whole_du[: len(h[part])]
        main.du, hyper.du = du.split((4 * H, 4 * N), dim=-1)
        if not pointwise.hyper_lstm_sequence(
            backend, main, hyper, "backward", None, near, None, gal, noise.h_share, previous
        ):
            _run_backward(main, hyper, du, factors, gal, noise.h_share, previous, backend)
        dg_hyper[part] = hyper.du
        add = start + steps < T
        weight_gradient(seen(h0, h, gal, part), du, backend, dmerged, add)
        weight_gradient(seen(e0, e, None, part), hyper.du, backend, dweight_e, add)
    dweight_z = weight_gradient(seen(e0, e, None) if previous else [e], dz, backend)
    return (
        dgx,
        dg_hyper,
        whole_dh(main),
        main.dc,
        whole_dh(hyper),
        hyper.dc,
        dmerged,
        dweight_e,
        dweight_z,
        dz.sum((0, 1)),
        main.dweight_d.sum(0),
        main.sums.sum(0),
        hyper.sums.sum(0),
    )


class _Factors:
    """The transposes that a backward pass multiplies by, laid out when they are first asked for."""

    def __init__(self, weights: Sequence[Tensor], T: int, B: int, backend: str):
        self.weights, self.sizes = weights, (T, B, backend)

    @functools.cached_property
    def laid(self) -> list[Factor]:
        return [Factor(weight, *self.sizes, transpose=True) for weight in self.weights]


def _run_backward(main: Gated, hyper: Gated, du_TBU, factors, gal, h_share, previous, backend) -> None:
    """All steps of some buffers backward, a call of either network and the products for each."""
    T = len(du_TBU)
    main_step = pointwise.gated(backend, main, "backward")
    _, weight_e, weight_z = factors.weights
    inner = pointwise.hypernetwork(
        backend, hyper, main, "backward", weight_e, weight_z, None, None, None, previous
    )
    hyper_step = pointwise.gated(backend, hyper, "backward")
    to_h, to_e, from_z = factors.laid
    du, du_hyper, dz = du_TBU.unbind(0), hyper.du.unbind(0), main.dz.unbind(0)
    for t in reversed(range(T)):
        main_step(t)
        if inner is not None:
            inner(t)
            to_h.product(du[t], main.dh)
        else:
            if not previous:
                from_z.product(dz[t], hyper.dh, hyper.dh)
            hyper_step(t)
            to_h.product(du[t], main.dh)
            to_e.product(du_hyper[t], hyper.dh)
            if previous:
                from_z.product(dz[t], hyper.dh, hyper.dh)
        through_recurrence(main.dh, gal, h_share, t)


@hyper_lstm_backward.register_fake
def _(dy, dh, dc, de, dk, u, h, c, a_hyper, e, k, z, gx, h0, c0, e0, k0, *weights_and_rest):
    weight, _, weight_e, weight_z, weight_d, *_ = weights_and_rest
    H, N = h0.shape[-1], e0.shape[-1]
    states = (torch.empty_like(part) for part in (h0, c0, e0, k0))
    return (
        torch.empty_like(gx),
        torch.empty_like(a_hyper),
        *states,
        weight.new_empty(H, 4 * (H + N)),
        torch.empty_like(weight_e),
        torch.empty_like(weight_z),
        weight_z.new_empty(weight_z.shape[1]),
        torch.empty_like(weight_d),
        c0.new_empty(SUMS * H),
        c0.new_empty(SUMS * N),
    )


def _context(ctx, inputs, output):
    gx, _, h0, c0, e0, k0, *weights = inputs[:13]
    norm, hyper_norm, mask, *noise = inputs[13:22]
    y, _, _, _, _, *kept = output
    u, c, h, a_hyper, e, k, z = kept
    weight, weight_hyper, weight_e, weight_z, _, weight_d, bias = weights
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(
        *(u, y if mask is None else h, c, a_hyper, e, k, z, gx, h0, c0, e0, k0),
        *(weight, weight_hyper, weight_e, weight_z, weight_d, bias),
        *(mask, *noise, *norm, *hyper_norm),
    )
    ctx.rest = inputs[22:]


def _gradients(ctx, dy, dh, dc, de, dk, *_):
    kept = ctx.saved_tensors
    tensors, others = kept[:18], kept[18:]
    mask, noise, norms = others[0], others[1:7], others[7:]
    norm, hyper_norm = norms[: len(norms) // 2], norms[len(norms) // 2 :]
    *gradients, dmerged, dweight_e, dweight_z, dbias_z, dweight_d, sums, hyper_sums = hyper_lstm_backward(
        dy, dh, dc, de, dk, *tensors, norm, hyper_norm, mask, *noise, *ctx.rest
    )
    H, N = tensors[8].shape[-1], tensors[10].shape[-1]
    dweight, dweight_hyper = dmerged.split((4 * H, 4 * N), dim=1)
    dbias, dnorm = split_sums(sums, H)
    _, dhyper_norm = split_sums(hyper_sums, N)
    weights = dweight, dweight_hyper, dweight_e, dweight_z, dbias_z, dweight_d, dbias.view(4, H)
    norms = (dnorm, dhyper_norm) if norm else ([], [])
    return *gradients, *weights, *norms, None, *(None,) * 6, None, None, None


hyper_lstm.register_autograd(_gradients, setup_context=_context)


def scan_hyper_lstm(
    cell: HyperLSTM,
    g: tuple[Tensor, ...],
    state: State,
    mask_TB: Tensor | None,
    noise: Noise | None,
    backend: str,
) -> tuple[Tensor, State]:
    """``Cell.forward`` of a HyperLSTM after its projection, by ``rhhn::hyper_lstm``."""
    config, scaling, dtype = cell.config, cell.scaling, g[0].dtype
    wide = state_dtype(dtype)
    h, c, e, k = state
    z_of_b = scaling.weight_z.shape[1] - len(scaling.bias_z)
    weights = (
        cell.weight_h,
        cell.weight_hyper,
        cell.hyper.weight_h,
        scaling.weight_z,
        torch.nn.functional.pad(scaling.bias_z, (0, z_of_b)),
    )
    y, *after = hyper_lstm(
        *(part.contiguous() for part in g),
        *(h.to(dtype), c.to(wide), e.to(dtype), k.to(wide)),
        *(weight.to(dtype) for weight in weights),
        torch.cat([scaling.weight_d, scaling.weight_b]).to(wide),
        scaling.bias.to(wide),
        norm_of(cell, dtype),
        norm_of(cell.hyper, dtype),
        mask_TB,
        *fields_of(Randomness.of(noise, config, g[0])),
        list(astuple(Numbers.of(config))),
        config.hyper_state == "previous",
        backend,
    )[:5]
    return y, tuple(new.to(old.dtype) for new, old in zip(after, state, strict=True))
