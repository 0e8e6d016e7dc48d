"""Whole sequences of RHN and of the main network of a HyperRHN as one differentiable operation,
``rhhn::highway``.

A layer of a time step is one matrix product and one call of the point-wise work. A HyperRHN's hypernetwork
runs first, as a separate highway, and z is computed from its states. The forward pass stores the products u,
the states and z. A recurrent weight's gradient is one product over all steps, or over many at a time.

z is computed, and its gradient used, for one block of steps at a time. The block is the whole sequence,
unless z would not fit into the processor's cache; then it is small enough to be read from the cache.

Shapes: T time, B batch, H hidden, L layers of a time step, N hyper; halves h, t in every weight's columns.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops import graphs, pointwise
from rhhn_fairseq.ops.backends import Plan, read_plan
from rhhn_fairseq.ops.buffers import Highway, state_dtype
from rhhn_fairseq.ops.gemm import PackedWeight, mm
from rhhn_fairseq.ops.highway_products import Products, is_rank_scaled, make_products
from rhhn_fairseq.ops.library import operation, refuse_gradients
from rhhn_fairseq.ops.loop import Noise
from rhhn_fairseq.ops.sequence import (
    expand_noise,
    gal_mask,
    gradient_share,
    no_gradients,
    or_zeros,
    through_recurrence,
)


class Biases(NamedTuple):
    """The biases; the last two only with a hypernetwork. The operation takes those that are not None, in the
    state type.

    Attributes:
        bias: of the recurrent maps, [L, 2 H].
        bias_x: of the input map, [2 H], which the hypervector does not scale. If it is None, the
            projection includes it.
        bias_z: what is added to the product with ``weight_z``, [L, H].
    """

    bias: Tensor
    bias_x: Tensor | None = None
    bias_z: Tensor | None = None


class Masks(NamedTuple):
    """Padding and noise of a pass; every field is optional.

    Attributes:
        real: [T, B], true at real positions. first: [T, B], where layer 0 leaves its bias out.
        gal: scaled mask on the state, [B, H]. keep: kept units of the transform gates, [T, B, L H].
        zone: units that keep their value, [T, B, H].
        s_share: [T], factors of the gradient of s through W_0.
    """

    real: Tensor | None = None
    first: Tensor | None = None
    gal: Tensor | None = None
    keep: Tensor | None = None
    zone: Tensor | None = None
    s_share: Tensor | None = None


class Numbers(NamedTuple):
    """The scalars of a pass.

    Attributes:
        keep_scale: factor of a kept unit of a transform gate.
        zone_rate: the share of the old value that zoneout keeps if there is no mask.
        trace: 1 to output the states after all layers, 0 to output only the last.
    """

    keep_scale: float = 1.0
    zone_rate: float = 0.0
    trace: float = 0.0


def gather_masks(
    mask_TB: Tensor | None,
    first_TB1: Tensor | None,
    noise: Noise | None,
    gal_rate: float,
    gx_TBG: Tensor,
    layers: int,
) -> Masks:
    """Returns the padding and the noise that a cell drew, in the form that the operation takes.

    Args:
        noise: entries ``gal``, ``update``, ``zoneout``, ``h_detach``.
        gal_rate: rate of Gal dropout. gx_TBG: projection of the input, G = 2 H.

    Raises:
        UsageError: an entry's shape cannot be expanded to what the operation reads.
    """
    (T, B, G), dtype = gx_TBG.shape, gx_TBG.dtype
    H = G // 2
    return Masks(
        None if mask_TB is None else mask_TB.contiguous(),
        None if first_TB1 is None else first_TB1.squeeze(-1).contiguous(),
        gal_mask(noise, gal_rate, B, H, dtype),
        expand_noise(noise, "update", T, B, layers * H),
        expand_noise(noise, "zoneout", T, B, H),
        gradient_share(noise, "h_detach", T, state_dtype(dtype)),
    )


def highway(
    gx: Tensor,
    s0: Tensor,
    weights: Sequence[Tensor],
    biases: Biases,
    hyper: Sequence[Tensor],
    masks: Masks,
    numbers: Numbers,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """Runs a recurrent highway network over a sequence.

    Args:
        gx: x U, with its bias unless ``biases.bias_x`` is given, [T, B, 2 H]. s0: [B, H].
        weights: W_l [H, 2 H] for each layer.
        hyper: states of the hypernetwork after all its layers [T, B, L N], and weight_z [L, N, H], which maps
            them to z; empty for a plain RHN. With a map to the vectors of several outer products instead of
            weight_z, see ``RankScaledProducts``, gx is already scaled and includes its bias.

    Returns:
        outputs [T, B, H], or [T, B, L H] with ``numbers.trace``, and the last state in the type of the first.
    """
    dtype = gx.dtype
    wide = state_dtype(dtype)
    y, s, *_ = highway_op(
        gx.contiguous(),
        s0.to(wide).contiguous(),
        [weight.to(dtype) for weight in weights],
        [bias.to(wide) for bias in biases if bias is not None],
        [tensor.to(dtype).contiguous() for tensor in hyper],
        list(masks),
        list(numbers),
        plan.text,
    )
    return y, s.to(s0.dtype)


@operation("rhhn::highway", graphs.captured)
def highway_op(
    gx: Tensor,
    s0: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    hyper: Sequence[Tensor],
    masks: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See ``highway``; s0 and biases in the state type, all contiguous.

    Returns:
        outputs; the last state; and for the backward pass u, the states after all layers, the same in the
        type of the operands if that differs, and z without its bias.
    """
    (T, B, width), L, masks, how = gx.shape, len(weights), Masks(*masks), read_plan(plan)
    H = width // 2
    u, s = gx.new_empty(L, T, B, width), s0.new_empty(L, T, B, H)
    buffers = _make_buffers((u, gx, s0, s), Biases(*biases), masks, Numbers(*numbers))
    products = make_products(buffers, weights, hyper, masks.gal, how.gemm)
    scaling = _Scaling(buffers, hyper, how) if hyper and products.plain else None
    if scaling is not None:
        scaling.start_forward()
    buffers.y = gx.new_empty(T, B, L * H if buffers.trace else H)
    buffers.o = None if gx.dtype == s0.dtype else gx.new_empty(L, T, B, H)
    run = None
    if products.plain:
        run = pointwise.highway_steps(how, buffers, "forward", weights, masks.gal, None)
    if run is None:
        run = _forward_steps(buffers, products, masks.gal, how)
    steps = products.forward_steps if scaling is None else scaling.steps
    for start in range(0, T, steps):
        if scaling is not None:
            scaling.before_forward(start)
        products.begin_block(start)
        run(start, min(start + steps, T))
    o, z = (gx.new_empty(0) if tensor is None else tensor for tensor in (buffers.o, buffers.z))
    return buffers.y, s[-1, -1].clone(), u, s, o, z


def _forward_steps(
    buffers: Highway, products: Products, gal: Tensor | None, plan: Plan
) -> Callable[[int, int], None]:
    """Returns a function that runs some steps forward, with a product and a call for each layer."""
    step = pointwise.highway(plan, buffers, "forward")
    u = [of_layer.unbind(0) for of_layer in buffers.u.unbind(0)]
    states = [of_layer.unbind(0) for of_layer in buffers.operands]

    def run(start: int, stop: int) -> None:
        read = states[-1][start - 1] if start else buffers.s0.to(buffers.u.dtype)
        for t in range(start, stop):
            for layer, of_layer in enumerate(states):
                products.multiply(layer, t, read if gal is None else read * gal, u[layer][t])
                step(t * len(states) + layer)
                read = of_layer[t]

    return run


def _make_buffers(sequence: Sequence[Tensor], biases: Biases, masks: Masks, numbers: Numbers) -> Highway:
    """Returns the buffers that forward and backward share; see ``buffers.Highway`` for the names.

    Args:
        sequence: u, gx, s0 and s.
    """
    u, gx, s0, s = sequence
    buffers = Highway(u=u, gx=gx, s0=s0, s=s, bias=biases.bias, bias_x=biases.bias_x)
    if biases.bias_z is not None:
        buffers.bias_z = biases.bias_z
    buffers.mask, buffers.first, _, buffers.keep, buffers.zone, _ = masks
    buffers.keep_scale, buffers.zone_rate, buffers.trace = (
        numbers.keep_scale,
        numbers.zone_rate,
        numbers.trace != 0,
    )
    return buffers


class _Scaling:
    """z and its gradient in the buffers of a highway, for one block of steps at a time.

    Args:
        hyper: states of the hypernetwork [T, B, L N], and weight_z [L, N, H].
    """

    CACHED = 1 << 21
    """Numbers in z up to which the CPU computes it for all steps at once."""

    ROWS = 256
    """Rows of a block with which multiplying takes longer than reading the matrices."""

    def __init__(self, p: Highway, hyper: Sequence[Tensor], plan: Plan):
        (states, weight_z), (L, T, B, _) = hyper, p.s.shape
        self.p, self.weight_z, self.gemm = p, weight_z, plan.gemm
        self.hyper_TBLN = states.unflatten(-1, (L, -1))
        # In blocks, the gradient of weight_z accumulates in the operands' type, which must be the states'.
        in_blocks = states.is_cpu and states.dtype == p.s.dtype and p.s.numel() > self.CACHED
        # Blocks of equal size, because a block of few rows takes longer per row.
        blocks = -(-T // -(-self.ROWS // B)) if in_blocks else 1
        self.steps = -(-T // blocks)

    def _packed(self, transpose: bool) -> PackedWeight:
        T, B = self.p.s.shape[1:3]
        return PackedWeight(self.weight_z, -(-T // self.steps), self.steps * B, self.gemm, transpose)

    def _rows(self, states_TBLN: Tensor, t: int) -> Tensor:
        """Returns the block that starts at step t as a view, [L, rows, N]."""
        return states_TBLN[t : t + self.steps].flatten(0, 1).transpose(0, 1)

    def start_forward(self) -> None:
        self.to_z = self._packed(transpose=False)
        self.p.z = self.hyper_TBLN.new_empty(self.p.s.shape)

    def before_forward(self, t: int) -> None:
        """Computes z of the block that starts at step t."""
        z = self.p.z[:, t : t + self.steps].flatten(1, 2)
        self.to_z.product(self._rows(self.hyper_TBLN, t), z)

    def start_backward(self) -> None:
        L, _, B, H = self.p.s.shape
        self.p.dz = self.hyper_TBLN.new_empty(L, self.steps, B, H)
        self.dhyper_TBLN = torch.empty_like(self.hyper_TBLN)
        self.dweight_z = torch.empty_like(self.weight_z)
        self.from_z = self._packed(transpose=True)

    def after_backward(self, t: int) -> None:
        """Backpropagates the gradients of z in the block that starts at step t."""
        rows = self._rows(self.hyper_TBLN, t)
        dz = self.p.dz.flatten(1, 2)[:, : rows.shape[1]]
        self.from_z.product(dz, self._rows(self.dhyper_TBLN, t))
        # The last block comes first and has nothing to be added to.
        others = self.dweight_z if t + self.steps < len(self.hyper_TBLN) else None
        mm(rows.transpose(1, 2), dz, self.dweight_z, others, self.gemm)

    def hyper_gradients(self) -> tuple[Tensor, Tensor]:
        """Returns the gradients of the states and of weight_z after the backward pass."""
        return self.dhyper_TBLN.flatten(2), self.dweight_z


@torch.library.register_fake(highway_op)
def _(gx, s0, weights, biases, hyper, masks, numbers, plan):
    (T, B, width), L, trace = gx.shape, len(weights), Numbers(*numbers).trace
    H = width // 2
    s = s0.new_empty(L, T, B, H)
    o = gx.new_empty(0) if gx.dtype == s0.dtype else gx.new_empty(L, T, B, H)
    z = gx.new_empty(L, T, B, H) if hyper and not is_rank_scaled(hyper, L) else gx.new_empty(0)
    y = gx.new_empty(T, B, L * H if trace else H)
    return y, torch.empty_like(s0), gx.new_empty(L, T, B, width), s, o, z


@operation("rhhn::highway_backward", graphs.captured)
def highway_backward(
    gradients: Sequence[Optional[Tensor]],
    kept: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    hyper: Sequence[Tensor],
    masks: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    plan: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The backward pass of ``highway_op``.

    Args:
        gradients: of the outputs and of the last state. kept: u, s, o and z. inputs: gx and s0.

    Returns:
        gradients of gx, s0, the weights [L, H, 2 H], the states of the hypernetwork, weight_z (both
        empty without one), and ``Highway.sums``.
    """
    (dy, ds_last), (u, s, o, z), (gx, s0) = gradients, kept, inputs
    (L, T, B, H), masks, how = s.shape, Masks(*masks), read_plan(plan)
    buffers = _make_buffers((u, gx, s0, s), Biases(*biases), masks, Numbers(*numbers))
    products = make_products(buffers, weights, hyper, masks.gal, how.gemm)
    products.start_backward()
    scaling = _Scaling(buffers, hyper, how) if hyper and products.plain else None
    if scaling is not None:
        buffers.z = z
        scaling.start_backward()
    buffers.o = o if o.numel() else None
    buffers.dy = None if dy is None else dy.contiguous()
    buffers.ds = gx.new_zeros(s0.shape)
    buffers.ds_direct, buffers.past = or_zeros(ds_last, s0), torch.zeros_like(s0)
    steps = products.steps
    buffers.du, buffers.dgx = u.new_empty(L, steps, B, 2 * H), torch.empty_like(gx)
    buffers.sums = pointwise.gradient_sums(how, [(3 * L + 2) * H], s0)
    run = None
    if products.plain:
        run = pointwise.highway_steps(how, buffers, "backward", weights, masks.gal, masks.s_share)
    if run is None:
        run = _backward_steps(buffers, products, masks, how)
    starts, stop = {*range(0, T, steps), *range(0, T, T if scaling is None else scaling.steps)}, T
    for start in sorted(starts, reverse=True):
        products.begin_block(start)
        run(start, stop)
        stop = start
        products.end_block(start)
        if scaling is not None and start % scaling.steps == 0:
            scaling.after_backward(start)
    dhyper, dweight_z = (scaling or products).hyper_gradients()
    dweights, ds0 = products.dweights.to(gx.dtype), buffers.ds_direct + buffers.ds
    return buffers.dgx, ds0, dweights, dhyper, dweight_z, buffers.sums.sum(0)


def _backward_steps(
    buffers: Highway, products: Products, masks: Masks, plan: Plan
) -> Callable[[int, int], None]:
    """Returns a function that runs some steps backward, with a call and a product for each layer."""
    L, step = len(buffers.s), pointwise.highway(plan, buffers, "backward")

    def run(start: int, stop: int) -> None:
        for t in reversed(range(start, stop)):
            for layer in reversed(range(L)):
                step(t * L + layer)
                products.multiply_backward(layer, t)
                through_recurrence(buffers.ds, masks.gal, None if layer else masks.s_share, t)

    return run


@torch.library.register_fake(highway_backward)
def _(gradients, kept, inputs, weights, biases, hyper, *_):
    s, (gx, s0) = kept[1], inputs
    L, H = len(s), s.shape[-1]
    made = [torch.empty_like(tensor) for tensor in hyper] or [gx.new_empty(0), gx.new_empty(0)]
    sums = s0.new_empty((3 * L + 2) * H)
    return torch.empty_like(gx), torch.empty_like(s0), gx.new_empty(L, H, 2 * H), *made, sums


def _context(ctx, inputs, output):
    gx, s0, weights, biases, hyper, masks, *ctx.rest = inputs
    kept = output[2:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.count = len(weights)
    ctx.save_for_backward(*kept, gx, s0, *masks, *weights, *hyper, *biases)


def _gradients(ctx, dy, ds_last, *_):
    saved, L = ctx.saved_tensors, ctx.count
    kept, inputs, masks, weights, others = (
        saved[:4],
        saved[4:6],
        saved[6:12],
        saved[12 : 12 + L],
        saved[12 + L :],
    )
    hyper, biases = (others[:2], others[2:]) if len(others) > 1 else ((), others)
    dgx, ds0, dweights, dhyper, dweight_z, sums = highway_backward(
        [dy, ds_last], kept, inputs, weights, biases, hyper, masks, *ctx.rest
    )
    H = ds0.shape[-1]
    # Without a hypernetwork the last biases are missing.
    pieces = zip(biases, sums.split((2 * L * H, 2 * H, L * H)), strict=False)
    dbiases = [gradient.view_as(bias) for bias, gradient in pieces]
    dhypers = [dhyper, dweight_z] if hyper else []
    return dgx, ds0, list(dweights.unbind(0)), dbiases, dhypers, no_gradients(masks), None, None


torch.library.register_autograd(highway_op, _gradients, setup_context=_context)
refuse_gradients(highway_backward)
