"""Whole sequences of recurrent highway networks as one differentiable operation, ``rhhn::highway``.

It serves RHN, the hypernetwork of a HyperRHN, whose output is the states after all its layers, and the main
network of a HyperRHN, which gets that output and makes the hypervectors z from it. A layer of a time step is
one matrix product and one call of the point-wise work. Forward keeps the products u, the states and z; a
recurrent weight's gradient is one product over all steps, or over many at a time.

z is made, and its gradient used, for a block of steps at a time: for all of them, or where that would be more
than the processor keeps near, for so few that they are read where they were written.

Shapes: T time, B batch, H hidden, L layers of a time step; halves h, t in every weight's columns.
"""

from collections.abc import Callable
from typing import Sequence

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Noise, State
from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.cells.rhn import RHN, RHNTrace
from rhhn_fairseq.kernels import graphs, pointwise
from rhhn_fairseq.kernels.buffers import Highway, state_dtype
from rhhn_fairseq.kernels.matmul import Factor, mm
from rhhn_fairseq.kernels.products import (
    gal_mask,
    gradient_share,
    noise_of,
    or_zeros,
    part_steps,
    seen,
    through_recurrence,
    weight_gradient,
)


@torch.library.custom_op("rhhn::highway", mutates_args=())
@graphs.captured
def highway(
    gx: Tensor,
    s0: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor,
    bias_x: Tensor | None,
    bias_z: Tensor | None,
    hyper: Tensor | None,
    weight_z: Tensor | None,
    first: Tensor | None,
    mask: Tensor | None,
    gal: Tensor | None,
    keep: Tensor | None,
    zone: Tensor | None,
    s_share: Tensor | None,
    keep_scale: float,
    zone_rate: float,
    trace: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A recurrent highway network over a sequence.

    Args:
        gx: x U, with its bias unless ``bias_x`` is given, [T, B, 2 H]. s0: [B, H], state type.
        weights: W_l [H, 2 H] for each layer. bias: [L, 2 H], state type. bias_x: [2 H], state type.
        hyper: states of the hypernetwork after all its layers [T, B, L N]; weight_z [L, N, H] makes z from
            them. bias_z: what is added to that, [L, H], state type.
        first: [T, B], where layer 0 leaves its bias out. mask: [T, B].
        gal: scaled mask on the state, [B, H]. keep: [T, B, L H]. zone: [T, B, H]. s_share: [T], what the
            gradient of s through W_0 is multiplied by.
        trace: give the states after all layers.
        backend: name of the point-wise implementation.

    Returns:
        outputs [T, B, H], or [T, B, L H] with ``trace``; the last state; and for the backward u, the states
        after all layers, if operands are of another type those as operands, and z without its bias.
    """
    (T, B, width), L = gx.shape, len(weights)
    H = width // 2
    u, s = gx.new_empty(L, T, B, width), s0.new_empty(L, T, B, H)
    biases = bias, bias_x, bias_z
    buffers = _buffers(u, gx, s0, s, biases, first, mask, keep, zone, keep_scale, zone_rate, trace)
    scaling = None if hyper is None else _Scaling(buffers, hyper, weight_z, backend)
    if scaling is not None:
        scaling.start_forward()
    buffers.y = gx.new_empty(T, B, L * H if trace else H)
    buffers.o = None if gx.dtype == s0.dtype else gx.new_empty(L, T, B, H)
    run = pointwise.highway_steps(backend, buffers, "forward", weights, gal, None)
    if run is None:
        run = _forward_steps(buffers, weights, gal, backend)
    steps = T if scaling is None else scaling.steps
    for start in range(0, T, steps):
        if scaling is not None:
            scaling.before_forward(start)
        run(start, min(start + steps, T))
    o, z = (gx.new_empty(0) if part is None else part for part in (buffers.o, buffers.z))
    return buffers.y, s[-1, -1].clone(), u, s, o, z


def _forward_steps(buffers: Highway, weights, gal, backend: str) -> Callable[[int, int], None]:
    """The function that runs some steps of the forward pass, a product and a call for each layer."""
    _, T, B, _ = buffers.s.shape
    step = pointwise.highway(backend, buffers, "forward")
    factors = [Factor(weight, T, B, backend) for weight in weights]
    products = [part.unbind(0) for part in buffers.u.unbind(0)]
    states = [part.unbind(0) for part in buffers.operands]

    def run(start: int, stop: int) -> None:
        read = states[-1][start - 1] if start else buffers.s0.to(buffers.u.dtype)
        for t in range(start, stop):
            for layer, factor in enumerate(factors):
                factor.product(read if gal is None else read * gal, products[layer][t])
                step(t * len(factors) + layer)
                read = states[layer][t]

    return run


def _buffers(u, gx, s0, s, biases, first, mask, keep, zone, keep_scale, zone_rate, trace) -> Highway:
    bias, bias_x, bias_z = biases
    return Highway(
        u=u,
        gx=gx,
        s0=s0,
        s=s,
        bias=bias,
        bias_x=bias_x,
        bias_z=bias_z,
        first=first,
        mask=mask,
        keep=keep,
        zone=zone,
        keep_scale=keep_scale,
        zone_rate=zone_rate,
        trace=trace,
    )


class _Scaling:
    """z and its gradient, in the buffers of a highway, block of steps by block of steps."""

    NEAR = 1 << 21
    """Numbers of z up to which the CPU makes it for all steps at once."""

    ROWS = 256
    """Rows of a product in parts, with which reading the matrices takes less time than multiplying."""

    def __init__(self, p: Highway, hyper: Tensor, weight_z: Tensor, backend: str):
        L, T, B, H = p.s.shape
        self.p, self.backend = p, backend
        self.hyper_TBLN = hyper.unflatten(-1, (L, -1))
        # In parts its weight's gradient is added up in the operands' type, which then has to be the states'.
        parts = hyper.is_cpu and hyper.dtype == p.s.dtype and p.s.numel() > self.NEAR
        # Blocks as equal as can be, since the fewer rows one has the longer they take by the row.
        blocks = -(-T // -(-self.ROWS // B)) if parts else 1
        self.steps = -(-T // blocks)
        self.sizes = weight_z, -(-T // self.steps), self.steps * B, backend

    def _rows(self, states_TBLN: Tensor, t: int) -> Tensor:
        """The block that starts at step t, [L, rows, N], a view."""
        return states_TBLN[t : t + self.steps].flatten(0, 1).transpose(0, 1)

    def start_forward(self) -> None:
        L, T, B, H = self.p.s.shape
        self.to_z = Factor(*self.sizes)
        self.p.z = self.hyper_TBLN.new_empty(L, T, B, H)

    def before_forward(self, t: int) -> None:
        """Makes z of the block that starts at step t."""
        z = self.p.z[:, t : t + self.steps].flatten(1, 2)
        self.to_z.product(self._rows(self.hyper_TBLN, t), z)

    def start_backward(self) -> None:
        L, _, B, H = self.p.s.shape
        self.p.dz = self.hyper_TBLN.new_empty(L, self.steps, B, H)
        self.dhyper_TBLN = torch.empty_like(self.hyper_TBLN)
        self.dweight_z = torch.empty_like(self.sizes[0])
        self.from_z = Factor(*self.sizes, transpose=True)

    def after_backward(self, t: int) -> None:
        """Goes on with the gradients of z in the block that starts at step t."""
        rows = self._rows(self.hyper_TBLN, t)
        dz = self.p.dz.flatten(1, 2)[:, : rows.shape[1]]
        self.from_z.product(dz, self._rows(self.dhyper_TBLN, t))
        # The last steps come first, and are not added to anything.
        others = self.dweight_z if t + self.steps < len(self.hyper_TBLN) else None
        mm(rows.transpose(1, 2), dz, self.dweight_z, others, self.backend)


@highway.register_fake
def _(gx, s0, weights, bias, bias_x, bias_z, hyper, weight_z, *others):
    trace = others[-2]
    (T, B, width), L = gx.shape, len(weights)
    H = width // 2
    s = s0.new_empty(L, T, B, H)
    o = gx.new_empty(0) if gx.dtype == s0.dtype else gx.new_empty(L, T, B, H)
    y = gx.new_empty(T, B, L * H if trace else H)
    z = gx.new_empty(0) if hyper is None else gx.new_empty(L, T, B, H)
    return y, torch.empty_like(s0), gx.new_empty(L, T, B, width), s, o, z


@torch.library.custom_op("rhhn::highway_backward", mutates_args=())
@graphs.captured
def highway_backward(
    dy: Tensor | None,
    ds_last: Tensor | None,
    u: Tensor,
    s: Tensor,
    o: Tensor,
    z: Tensor,
    gx: Tensor,
    s0: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor,
    bias_x: Tensor | None,
    bias_z: Tensor | None,
    hyper: Tensor | None,
    weight_z: Tensor | None,
    first: Tensor | None,
    mask: Tensor | None,
    gal: Tensor | None,
    keep: Tensor | None,
    zone: Tensor | None,
    s_share: Tensor | None,
    keep_scale: float,
    zone_rate: float,
    trace: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of gx, s0, the weights [L, H, 2 H], hyper, weight_z (empty without), and ``Highway.sums``."""
    L, _, _, H = s.shape
    biases = bias, bias_x, bias_z
    buffers = _buffers(u, gx, s0, s, biases, first, mask, keep, zone, keep_scale, zone_rate, trace)
    scaling = None if hyper is None else _Scaling(buffers, hyper, weight_z, backend)
    if scaling is not None:
        buffers.z = z
        scaling.start_backward()
    buffers.o = o if o.numel() else None
    buffers.dy = None if dy is None else dy.contiguous()
    buffers.ds = gx.new_zeros(s0.shape)
    buffers.ds_direct, buffers.past = or_zeros(ds_last, s0), torch.zeros_like(s0)
    T, B, _ = gx.shape
    steps = part_steps(T, B, u.dtype, s0.dtype)
    buffers.du, buffers.dgx = u.new_empty(L, steps, B, 2 * H), torch.empty_like(gx)
    buffers.sums = pointwise.sums_of(backend, [(3 * L + 2) * H], s0)
    run = pointwise.highway_steps(backend, buffers, "backward", weights, gal, s_share)
    if run is None:
        run = _backward_steps(buffers, weights, gal, s_share, backend)
    dweights = gx.new_empty(L, H, 2 * H)
    starts, stop = {*range(0, T, steps), *range(0, T, T if scaling is None else scaling.steps)}, T
    for start in sorted(starts, reverse=True):
        run(start, stop)
        stop = start
        if start % steps == 0:
            _add_weight_gradients(buffers, start, gal, backend, dweights)
        if scaling is not None and start % scaling.steps == 0:
            scaling.after_backward(start)
    dhyper = gx.new_empty(0) if scaling is None else scaling.dhyper_TBLN.flatten(2)
    dweight_z = gx.new_empty(0) if scaling is None else scaling.dweight_z
    return buffers.dgx, buffers.ds_direct + buffers.ds, dweights, dhyper, dweight_z, buffers.sums.sum(0)


def _add_weight_gradients(buffers: Highway, t: int, gal, backend: str, dweights_LHG: Tensor) -> None:
    """Adds those of the steps that du holds, from t on; the last ones, which come first, are written."""
    T, states = buffers.s.shape[1], buffers.operands
    steps = slice(t, min(t + buffers.du.shape[1], T))
    du = buffers.du[:, : steps.stop - t]
    blocks = [seen(buffers.s0.to(states.dtype), states[-1], gal, steps)]
    for below in states[:-1, steps]:
        blocks.append([below if gal is None else below * gal])
    for own, *operands in zip(dweights_LHG, blocks, du, strict=True):
        weight_gradient(*operands, backend, own, add=steps.stop < T)


def _backward_steps(buffers: Highway, weights, gal, s_share, backend: str) -> Callable[[int, int], None]:
    """The function that runs some steps of the backward pass, a call and a product for each layer."""
    L, T, B, _ = buffers.s.shape
    step = pointwise.highway(backend, buffers, "backward")
    factors = [Factor(weight, T, B, backend, transpose=True) for weight in weights]
    du, steps = [part.unbind(0) for part in buffers.du.unbind(0)], buffers.du.shape[1]

    def run(start: int, stop: int) -> None:
        for t in reversed(range(start, stop)):
            for layer in reversed(range(L)):
                step(t * L + layer)
                factors[layer].product(du[layer][t % steps], buffers.ds)
                through_recurrence(buffers.ds, gal, None if layer else s_share, t)

    return run


@highway_backward.register_fake
def _(dy, ds_last, u, s, o, z, gx, s0, weights, bias, bias_x, bias_z, hyper, weight_z, *_):
    L, H = len(s), s.shape[-1]
    made = [gx.new_empty(0) if part is None else torch.empty_like(part) for part in (hyper, weight_z)]
    sums = s0.new_empty((3 * L + 2) * H)
    return torch.empty_like(gx), torch.empty_like(s0), gx.new_empty(L, H, 2 * H), *made, sums


def _context(ctx, inputs, output):
    gx, s0, weights, *others = inputs
    _, _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*kept, gx, s0, *others[:11], *weights)
    ctx.rest = others[11:]


def _gradients(ctx, dy, ds_last, *_):
    *kept, gx, s0 = ctx.saved_tensors[:6]
    others = ctx.saved_tensors[6:]
    tensors, weights = others[:11], others[11:]
    bias, bias_x, bias_z, hyper = tensors[:4]
    dgx, ds0, dweights, dhyper, dweight_z, sums = highway_backward(
        dy, ds_last, *kept, gx, s0, list(weights), *tensors, *ctx.rest
    )
    L, H = len(bias), s0.shape[-1]
    dbias, dbias_x, dbias_z = sums.split((2 * L * H, 2 * H, L * H))
    return (
        dgx,
        ds0,
        list(dweights.unbind(0)),
        dbias.view_as(bias),
        None if bias_x is None else dbias_x,
        None if bias_z is None else dbias_z.view_as(bias_z),
        *((None, None) if hyper is None else (dhyper, dweight_z)),
        *(None,) * 6,
        *(None,) * 4,
    )


highway.register_autograd(_gradients, setup_context=_context)


def scan_rhn(
    cell: RHN | HyperRHN,
    g: tuple[Tensor, ...],
    state: State,
    mask_TB: Tensor | None,
    noise: Noise | None,
    backend: str,
) -> tuple[Tensor, State]:
    """``Cell.forward`` after projection and preparation, by ``rhhn::highway``."""
    config, (gx, *scaling), (s0, *others) = cell.config, g, state
    dtype, L = gx.dtype, len(cell.weight_s)
    T, B, H = *gx.shape[:2], config.hidden_size
    wide = state_dtype(dtype)
    hyper = weight_z = first = bias_x = bias_z = None
    if scaling:
        hyper, *first_TB1 = scaling
        hyper, weight_z = hyper.to(dtype).contiguous(), cell.weight_z.to(dtype)
        first = first_TB1[0].squeeze(-1).contiguous() if first_TB1 else None
        bias_x, bias_z = cell.bias_x.to(wide), cell.z_shift().to(wide)
    y, s, *_ = highway(
        gx.contiguous(),
        s0.to(wide),
        [weight.to(dtype) for weight in cell.weight_s],
        torch.stack(list(cell.bias_s)).to(wide),
        bias_x,
        bias_z,
        hyper,
        weight_z,
        first,
        mask_TB,
        gal_mask(noise, config.gal_dropout, B, H, dtype),
        noise_of(noise, "update", T, B, L * H),
        None if isinstance(cell, RHNTrace) else noise_of(noise, "zoneout", T, B, H),
        gradient_share(noise, "h_detach", T, wide),
        1.0 / (1.0 - config.recurrent_dropout),
        config.zoneout,
        isinstance(cell, RHNTrace),
        backend,
    )
    return y, (s.to(s0.dtype), *others)
