"""All steps of a small LSTM or LN LSTM in one Triton kernel, forward and backward.

As in highway_sequence.py, each program runs ROWS sequences through all steps and keeps h and c, or their
gradients, in registers. The kernel supports what cuDNN does not: normalisation, noise within a sequence,
detached gradients.

Arguments have the names and shapes of ``buffers.Gated``; a missing tensor is None. Further arguments:

    weight  W_h [H, 4 H], of the operands' type
    gal     factors of h before its product, [B, H]
    share   factors of the gradient of h through its product, [T]
    KEEP_T  1 if ``keep`` has a mask for each step, 0 if one mask serves all steps

Except for the sums, no pass reads what it has written: the compiler may move loads of a loop ahead of the
previous step.
"""

import triton
import triton.language as tl

from rhhn_fairseq.ops.triton.functions import dropped, get, kept, real, sigmoid, tanh, tile, zoned
from rhhn_fairseq.ops.triton.gate_products import back, gate_sums
from rhhn_fairseq.ops.triton.gated_step import arriving, gates, into_gates, output, spread

STEPS = ["T", "B"]
"""Arguments that Triton must not specialise on: it would recompile for 1 and for multiples of 16."""


@triton.jit(do_not_specialize=STEPS)
def forward(
    u, gx, weight, gate_gain, gate_shift, c_gain, c_shift, mask, keep, zone_h, zone_c, gal, h0, c0, h, c, y,
    T, B,
    H: tl.constexpr, KEEP_T: tl.constexpr, FORGET_BIAS: tl.constexpr, EPSILON: tl.constexpr,
    KEEP_SCALE: tl.constexpr, ZONE_H_RATE: tl.constexpr, ZONE_C_RATE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes u, h, c and y of all steps."""
    S: tl.constexpr = c.dtype.element_ty
    TYPE: tl.constexpr = u.dtype.element_ty
    row, column, inside = tile(B, H, ROWS, COLS)
    own = row * H + column
    h_old, c_old = get(h0, own, inside, S), get(c0, own, inside, S)
    for t in tl.range(T):
        at = t * B + row
        place = at * H + column
        live = real(inside, mask, at, row < B)
        where, norm, summands = (row, column, inside, live), (gate_gain, gate_shift), (gx, None)
        seen = dropped(h_old, gal, own, inside, TYPE)
        i, f, g, o = gate_sums(u, summands, weight, seen, norm, at, where, H, 0, EPSILON, PRECISION, COLS, S)
        update = kept(tanh(g), keep, (t * KEEP_T * B + row) * H + column, live, KEEP_SCALE)
        c_new = sigmoid(f + FORGET_BIAS) * c_old + sigmoid(i) * update
        h_new = output(c_new, o, (c_gain, c_shift), where, H, EPSILON)
        h_new = zoned(h_old, h_new, zone_h, place, live, ZONE_H_RATE)
        c_new = zoned(c_old, c_new, zone_c, place, live, ZONE_C_RATE)
        # The next step reads the state as it is stored.
        h_old = tl.where(live, h_new, h_old).to(TYPE).to(S)
        c_old = tl.where(live, c_new, c_old)
        tl.store(h + place, h_old, mask=inside)
        tl.store(c + place, c_old, mask=inside)
        if y is not None:
            tl.store(y + place, tl.where(live, h_new, 0.0), mask=inside)


@triton.jit(do_not_specialize=STEPS)
def backward(
    u, weight, gate_gain, gate_shift, c_gain, c_shift, mask, keep, zone_h, zone_c, c_scale, gal, share, c0, c,
    dy, dh, dh_direct, dc, du, sums, T, B,
    H: tl.constexpr, KEEP_T: tl.constexpr, FORGET_BIAS: tl.constexpr, EPSILON: tl.constexpr,
    KEEP_SCALE: tl.constexpr, ZONE_H_RATE: tl.constexpr, ZONE_C_RATE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes du of all steps, turns dh, dh_direct and dc into the gradients of h0 and c0, adds to sums."""
    S: tl.constexpr = dc.dtype.element_ty
    TYPE: tl.constexpr = u.dtype.element_ty
    row, column, inside = tile(B, H, ROWS, COLS)
    own, slot = row * H + column, sums + tl.program_id(0) * 14 * H
    through, dc_old, direct = get(dh, own, inside, S), get(dc, own, inside, S), tl.zeros([ROWS, COLS], S)
    if dh_direct is not None:
        direct = get(dh_direct, own, inside, S)
    for ago in tl.range(T):
        t = T - 1 - ago
        at = t * B + row
        place = at * H + column
        live = real(inside, mask, at, row < B)
        where, norm = (row, column, inside, live), (gate_gain, gate_shift)
        summands = (u, None, None, None)
        sums_of_gates, normals = gates(summands, norm, at, where, B, H, 4 * H, EPSILON, S)
        before = get(c, place - B * H, live & (t > 0), S) + get(c0, own, live & (t == 0), S)
        dh_new, direct = arriving(through, direct, dy, zone_h, at, where, H, ZONE_H_RATE, S)
        keep_place, scale = (t * KEEP_T * B + row) * H + column, None
        if c_scale is not None:
            scale = c_scale + t
        d_gates, dc_old = into_gates(
            dh_new, dc_old, before, sums_of_gates, (c_gain, c_shift), (keep, keep_place), zone_c, scale,
            place, slot, where, H, FORGET_BIAS, EPSILON, KEEP_SCALE, ZONE_C_RATE, COLS,
        )  # fmt: skip
        read, write = (u, None, None), (du, None, None)
        d_sums = spread(d_gates, gate_gain, normals, read, write, slot, at, where, B, H, 4 * H, 4 * H, COLS)
        seen = back(d_sums, weight, tl.zeros([ROWS, COLS], S), H, TYPE, PRECISION, COLS)
        through = dropped(seen, gal, own, inside, TYPE).to(S)
        if share is not None:
            through = (through * tl.load(share + t)).to(TYPE).to(S)
        if gate_gain is not None:
            # The next step adds to sums that other threads of the program have stored.
            tl.debug_barrier()
    tl.store(dh + own, through, mask=inside)
    tl.store(dc + own, dc_old, mask=inside)
    if dh_direct is not None:
        tl.store(dh_direct + own, direct, mask=inside)
