"""One layer of a time step of recurrent highway networks as a Triton kernel, forward and backward.

Arguments have the names and shapes of ``buffers.Highway``; a missing tensor is None. Further arguments:

    s_before  the state that the layer reads: s0 [B, H] or s, from row ``before``
    s_start   the state at the start of the time step: s0 or s, from row ``start``

y and dy are None for a layer without an output. The equations are in cells/rhn.py and cells/hyper_rhn.py. The
order of halves is h, t. Operands are read as zero at padding, so values there reach nothing.
"""

import triton
import triton.language as tl

from rhhn_fairseq.ops.triton.functions import (
    add_up,
    get,
    kept,
    real,
    sigmoid,
    staying,
    tanh,
    tile,
    zoned,
)

STEPS = ["t", "layer", "before", "start", "T", "B", "D_STEPS"]
"""Arguments that Triton must not specialise on: it would recompile for 1 and for multiples of 16."""


@triton.jit
def product(half: tl.constexpr, u, gx, at, place, column, live, H: tl.constexpr, S: tl.constexpr):
    """The product in half of the sums, which z scales; includes gx in layer 0, but no bias."""
    a = get(u, place * 2 * H + half * H + column, live, S)
    if gx is not None:
        a += get(gx, at * 2 * H + half * H + column, live, S)
    return a


@triton.jit
def gate_sum(half: tl.constexpr, a, z, biases, column, layer, biased, H: tl.constexpr, S: tl.constexpr):
    """Half of the sums from its product; ``biased`` marks the elements that take the recurrent bias."""
    bias, bias_x = biases
    if z is not None:
        a *= z
    a += tl.where(biased, get(bias, layer * 2 * H + half * H + column, column < H, S), 0.0)
    if bias_x is not None:
        a += get(bias_x, half * H + column, column < H, S)
    return a


@triton.jit
def takes_bias(live, first, at, exists):
    """The live elements that take the recurrent bias; layer 0 may not take it at the first position."""
    biased = live
    if first is not None:
        biased = live & (tl.load(first + at, mask=exists, other=0) == 0)
    return biased


@triton.jit(do_not_specialize=STEPS)
def forward(
    u, gx, z, bias, bias_x, bias_z, first, mask, keep, zone_h, s_before, s_start, s, o, y, t, layer, before,
    start, T, B,
    H: tl.constexpr, L: tl.constexpr, LD_Y: tl.constexpr, LAST: tl.constexpr, KEEP_SCALE: tl.constexpr,
    ZONE_RATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes s, o and y of a layer."""
    S: tl.constexpr = s.dtype.element_ty
    row, column, inside = tile(B, H, ROWS, COLS)
    at, place = t * B + row, (layer * T + t) * B + row
    live = real(inside, mask, at, row < B)
    biased = takes_bias(live, first, at, row < B)
    old = get(s_before, (before + row) * H + column, inside, S)
    scaling = None
    if z is not None:
        scaling = get(z, place * H + column, live, S) + get(bias_z, layer * H + column, column < H, S)
    h = product(0, u, gx, at, place, column, live, H, S)
    gate = product(1, u, gx, at, place, column, live, H, S)
    h = tanh(gate_sum(0, h, scaling, (bias, bias_x), column, layer, biased, H, S))
    gate = sigmoid(gate_sum(1, gate, scaling, (bias, bias_x), column, layer, biased, H, S))
    new = (1.0 - gate) * old + kept(gate, keep, (at * L + layer) * H + column, live, KEEP_SCALE) * h
    at_padding = tl.zeros_like(new)
    if LAST:
        at_padding = get(s_start, (start + row) * H + column, inside, S)
        new = zoned(at_padding, new, zone_h, at * H + column, live, ZONE_RATE)
    if y is not None:
        # If y holds one layer only, it is the last one.
        in_row = column if LD_Y == H else layer * H + column
        tl.store(y + at * LD_Y + in_row, tl.where(live, new, 0.0), mask=inside)
    new = tl.where(live, new, at_padding)
    tl.store(s + place * H + column, new, mask=inside)
    if o is not None:
        tl.store(o + place * H + column, new, mask=inside)


@triton.jit(do_not_specialize=STEPS)
def backward(
    u, gx, z, bias, bias_x, bias_z, first, mask, keep, zone_h, s_before, dy, ds, ds_direct, past, du, dgx, dz,
    sums, t, layer, before, T, B, D_STEPS,
    H: tl.constexpr, L: tl.constexpr, LD_Y: tl.constexpr, LAST: tl.constexpr, KEEP_SCALE: tl.constexpr,
    ZONE_RATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes du, dgx and dz of a layer, updates ds_direct for the layer below, adds to sums."""
    S: tl.constexpr = ds_direct.dtype.element_ty
    row, column, inside = tile(B, H, ROWS, COLS)
    at, place, own = t * B + row, (layer * T + t) * B + row, row * H + column
    live = real(inside, mask, at, row < B)
    biased = takes_bias(live, first, at, row < B)
    grad = get(ds_direct, own, inside, S) + get(ds, own, inside, S)
    passing = grad
    if dy is not None:
        in_row = column if LD_Y == H else layer * H + column
        grad += get(dy, at * LD_Y + in_row, live, S)
    grad = tl.where(live, grad, 0.0)
    if LAST:
        stays = staying(zone_h, at * H + column, live, ZONE_RATE, S)
        passing = tl.where(live, grad * stays, passing)
        tl.store(past + own, passing, mask=inside)
        grad *= 1.0 - stays
    elif gx is not None:
        passing = get(past, own, inside, S)

    old = get(s_before, (before + row) * H + column, live, S)
    scaling = None
    if z is not None:
        scaling = get(z, place * H + column, live, S) + get(bias_z, layer * H + column, column < H, S)
    h_product = product(0, u, gx, at, place, column, live, H, S)
    gate_product = product(1, u, gx, at, place, column, live, H, S)
    h = tanh(gate_sum(0, h_product, scaling, (bias, bias_x), column, layer, biased, H, S))
    gate = sigmoid(gate_sum(1, gate_product, scaling, (bias, bias_x), column, layer, biased, H, S))
    keep_place = (at * L + layer) * H + column
    d_h = grad * kept(gate, keep, keep_place, live, KEEP_SCALE) * (1.0 - h * h)
    d_gate = (kept(grad * h, keep, keep_place, live, KEEP_SCALE) - grad * old) * gate * (1.0 - gate)
    direct = grad * (1.0 - gate)
    if gx is not None:
        direct += passing
    tl.store(ds_direct + own, direct, mask=inside)

    slot = sums + tl.program_id(0) * (3 * L + 2) * H
    add_up(slot + layer * 2 * H, tl.where(biased, d_h, 0.0), H, COLS)
    add_up(slot + layer * 2 * H + H, tl.where(biased, d_gate, 0.0), H, COLS)
    if bias_x is not None:
        add_up(slot + L * 2 * H, d_h, H, COLS)
        add_up(slot + L * 2 * H + H, d_gate, H, COLS)
    d_place = (layer * D_STEPS + t % D_STEPS) * B + row
    if z is not None:
        d_z = d_h * h_product + d_gate * gate_product
        tl.store(dz + d_place * H + column, d_z, mask=inside)
        add_up(slot + ((L + 1) * 2 + layer) * H, d_z, H, COLS)
        d_h *= scaling
        d_gate *= scaling
    tl.store(du + d_place * 2 * H + column, d_h, mask=inside)
    tl.store(du + d_place * 2 * H + H + column, d_gate, mask=inside)
    if gx is not None:
        tl.store(dgx + at * 2 * H + column, d_h, mask=inside)
        tl.store(dgx + at * 2 * H + H + column, d_gate, mask=inside)
