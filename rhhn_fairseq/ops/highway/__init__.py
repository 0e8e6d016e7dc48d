"""Whole sequences of RHN and of the main network of a HyperRHN as one differentiable operation,
``rhhn::highway``.

A layer of a time step is one matrix product and one call of the point-wise work. A HyperRHN's hypernetwork
runs first, as a separate highway, and z is computed from its states. The forward pass stores the products u,
the states and z. A weight's gradient is one product over all steps, or over many at a time.

Shapes: T time, B batch, H hidden, L layers of a time step, N hyper; halves h, t in every weight's columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops.backends import Plan, graphs, plan_named, pointwise
from rhhn_fairseq.ops.buffers import UNSET, Highway, HighwayGradients, state_dtype
from rhhn_fairseq.ops.highway.products import Products, hypervectors, is_rank_scaled, make_products
from rhhn_fairseq.ops.library import differentiate, operation
from rhhn_fairseq.ops.sequence import Masks, Resets, or_zeros, through_recurrence


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


class HighwayNumbers(NamedTuple):
    """The scalars of a pass.

    Attributes:
        keep_scale: factor of a kept unit of a transform gate.
        zone_rate: the share of the old value that zoneout keeps if there is no mask.
        trace: 1 to output the states after all layers, 0 to output only the last.
    """

    keep_scale: float = 1.0
    zone_rate: float = 0.0
    trace: float = 0.0


def highway(
    gx: Tensor,
    s0: Tensor,
    weights: Sequence[Tensor],
    biases: Biases,
    hyper: Sequence[Tensor],
    masks: Masks,
    numbers: HighwayNumbers,
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
        [bias.to(wide).contiguous() for bias in biases if bias is not None],
        [tensor.to(dtype).contiguous() for tensor in hyper],
        list(masks),
        list(numbers),
        plan.name,
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
    (T, B, width), L, how = gx.shape, len(weights), plan_named(plan)
    H = width // 2
    u, s = gx.new_empty(L, T, B, width), s0.new_empty(L, T, B, H)
    buffers = _make_buffers(
        biases,
        masks,
        numbers,
        u=u,
        gx=gx,
        s0=s0,
        s=s,
        z=hypervectors(hyper, s.shape, how.gemm),
        o=None if gx.dtype == s0.dtype else gx.new_empty(L, T, B, H),
        y=gx.new_empty(T, B, L * H if HighwayNumbers(*numbers).trace else H),
    )
    products = make_products(buffers, weights, hyper, how.gemm)
    run = pointwise.many_steps(how, buffers, None, weights) if products.plain else None
    run = run or _forward_steps(buffers, products, how)
    resets = Resets(buffers.resets)
    states = [s[-1]] if buffers.o is None else [s[-1], buffers.o[-1]]
    for start in range(0, T, products.forward_steps):
        products.begin_block(start)
        resets.forward(run, start, min(start + products.forward_steps, T), states)
    o, z = (gx.new_empty(0) if tensor is None else tensor for tensor in (buffers.o, buffers.z))
    return buffers.y, s[-1, -1].clone(), u, s, o, z


def _make_buffers(biases: Sequence, masks: Sequence, numbers: Sequence[float], **sequence: Any) -> Highway:
    """Returns the buffers of a pass; see ``buffers.Highway`` for the names."""
    further = Biases(*biases)._asdict() | Masks(*masks).of(Highway) | HighwayNumbers(*numbers)._asdict()
    return Highway(**sequence, **further)


def _forward_steps(buffers: Highway, products: Products, plan: Plan) -> Callable[[int, int], None]:
    """Returns a function that runs some steps forward, with a product and a call for each layer."""
    step, gal = pointwise.step(plan, buffers), buffers.gal
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


@torch.library.register_fake(highway_op)
def _(gx, s0, weights, biases, hyper, masks, numbers, *_):
    (T, B, width), L, trace = gx.shape, len(weights), HighwayNumbers(*numbers).trace
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
    gx: Tensor,
    s0: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    hyper: Sequence[Tensor],
    masks: Sequence[Optional[Tensor]],
    numbers: Sequence[float],
    plan: str,
) -> list[Tensor]:
    """The backward pass of ``highway_op``.

    Args:
        gradients: of the outputs and of the last state. kept: u, s, o and z.

    Returns:
        gradients of gx, s0, the weights, the biases, and the tensors of ``hyper``.
    """
    (dy, ds_last), (u, s, o, z) = gradients, kept
    (L, T, B, H), how = s.shape, plan_named(plan)
    z_kept, o_kept = (tensor if tensor.numel() else None for tensor in (z, o))
    buffers = _make_buffers(biases, masks, numbers, u=u, gx=gx, s0=s0, s=s, z=z_kept, o=o_kept)
    products = make_products(buffers, weights, hyper, how.gemm)
    steps = products.steps
    grads = HighwayGradients(
        dy=None if dy is None else dy.contiguous(),
        ds=gx.new_zeros(s0.shape),
        ds_direct=or_zeros(ds_last, s0),
        past=torch.zeros_like(s0),
        du=u.new_empty(L, steps, B, 2 * H),
        dgx=torch.empty_like(gx),
        sums=pointwise.gradient_sums(how, [(3 * L + 2) * H], s0),
        dz=UNSET if z_kept is None else z.new_empty(L, steps, B, H),
    )
    products.start_backward(grads)
    run = pointwise.many_steps(how, buffers, grads, weights) if products.plain else None
    run = run or _backward_steps(buffers, grads, products, how)
    resets = Resets(buffers.resets)
    for start in reversed(range(0, T, steps)):
        products.begin_block(start)
        resets.backward(run, start, min(start + steps, T), (grads.ds, grads.ds_direct))
        products.end_block(start)
    ds0, sums = grads.ds_direct + grads.ds, grads.sums.sum(0)
    # Without a hypernetwork the last biases are missing. An operation's results must not share memory.
    pieces = zip(biases, sums.split((2 * L * H, 2 * H, L * H)), strict=False)
    dbiases = [gradient.view_as(bias).clone() for bias, gradient in pieces]
    return [grads.dgx, ds0, *products.weight_gradients(), *dbiases, *products.hyper_gradients()]


def _backward_steps(
    buffers: Highway, grads: HighwayGradients, products: Products, plan: Plan
) -> Callable[[int, int], None]:
    """Returns a function that runs some steps backward, with a call and a product for each layer."""
    L, step = len(buffers.s), pointwise.step(plan, buffers, grads)

    def run(start: int, stop: int) -> None:
        for t in reversed(range(start, stop)):
            for layer in reversed(range(L)):
                step(t * L + layer)
                products.multiply_backward(layer, t)
                through_recurrence(grads.ds, buffers.gal, None if layer else buffers.share, t)

    return run


differentiate(
    highway_op,
    highway_backward,
    outputs=2,
    differentiable=5,
    keep=lambda inputs, output: (inputs, output[2:]),
)
