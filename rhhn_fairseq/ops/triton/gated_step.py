"""One step of LSTM, LN LSTM, HyperLSTM and LN HyperLSTM as a Triton kernel, forward and backward.

Arguments have the names and shapes of ``buffers.Gated``; a missing tensor is None. Further arguments:

    d, dd               scaling vectors of the step [12, B, H], and their gradients [12, DD_STEPS, B, H]
    t_du, t_dd          steps at which ``du`` and ``dd`` are written
    h_before, c_before  h0 and c0 at the first step, h and c later, read at step t_before
    t_keep              step at which ``keep`` is read
    LD_U, LD_DU         elements between rows of u and of du

The equations are in cells/lstm.py and cells/hyper_lstm.py. The order of gates is i, f, g, o. Operands are
read as zero at padding, so values there reach nothing.
"""

import triton
import triton.language as tl

from rhhn_fairseq.ops.triton.functions import (
    add_up,
    get,
    kept,
    normalise,
    normalise_backward,
    real,
    sigmoid,
    staying,
    tanh,
    tile,
    zoned,
)

STEPS = ["t", "t_before", "t_keep", "t_du", "t_dd", "B"]
"""Arguments that Triton must not specialise on: it would recompile for 1 and for multiples of 16."""


@triton.jit
def normed(k: tl.constexpr, a, norm, where, H: tl.constexpr, EPSILON: tl.constexpr):
    """Layer normalisation, gain and shift k of ``norm``; also the result before these, and 1 / deviation."""
    S: tl.constexpr = a.dtype
    gain, shift = norm
    _, column, inside, _ = where
    normal, rstd = a, a
    if gain is not None:
        normal, rstd = normalise(a, inside, H, EPSILON)
        a = normal * get(gain, k * H + column, column < H, S) + get(shift, k * H + column, column < H, S)
    return a, normal, rstd


@triton.jit
def output(inner, o, c_norm, where, H: tl.constexpr, EPSILON: tl.constexpr):
    """The output h of a step from its c, ``inner``, and the sum of its output gate."""
    inner, _, _ = normed(0, inner, c_norm, where, H, EPSILON)
    return sigmoid(o) * tanh(inner)


@triton.jit
def gate(
    k: tl.constexpr, summands, norm, at, where, B, H: tl.constexpr, LD_U: tl.constexpr, EPSILON: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """The sum of gate k; for the backward pass also its value before gain and shift, and 1 / deviation."""
    u, gx, d, bias = summands
    row, column, _, live = where
    a = get(u, at * LD_U + k * H + column, live, S)
    if d is not None:
        d_h = get(d, (k * B + row) * H + column, live, S)
        d_x = get(d, ((4 + k) * B + row) * H + column, live, S)
        b = get(d, ((8 + k) * B + row) * H + column, live, S)
        b += get(bias, k * H + column, column < H, S)
        a = d_h * a + (d_x * get(gx, at * 4 * H + k * H + column, live, S) + b)
    return normed(k, a, norm, where, H, EPSILON)


@triton.jit
def gates(
    summands, norm, at, where, B,
    H: tl.constexpr, LD_U: tl.constexpr, EPSILON: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The sums of i, f, g, o; for each also its value before gain and shift, and 1 / deviation."""
    i, i_normal, i_rstd = gate(0, summands, norm, at, where, B, H, LD_U, EPSILON, S)
    f, f_normal, f_rstd = gate(1, summands, norm, at, where, B, H, LD_U, EPSILON, S)
    g, g_normal, g_rstd = gate(2, summands, norm, at, where, B, H, LD_U, EPSILON, S)
    o, o_normal, o_rstd = gate(3, summands, norm, at, where, B, H, LD_U, EPSILON, S)
    return (i, f, g, o), ((i_normal, i_rstd), (f_normal, f_rstd), (g_normal, g_rstd), (o_normal, o_rstd))


@triton.jit(do_not_specialize=STEPS)
def forward(
    u, gx, d, bias, gate_gain, gate_shift, c_gain, c_shift, mask, keep, zone_h, zone_c, h_before, c_before, h,
    c, y, t, t_before, t_keep, B,
    H: tl.constexpr, LD_U: tl.constexpr, FORGET_BIAS: tl.constexpr, EPSILON: tl.constexpr,
    KEEP_SCALE: tl.constexpr, ZONE_H_RATE: tl.constexpr, ZONE_C_RATE: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Writes h, c and y of step t."""
    S: tl.constexpr = c.dtype.element_ty
    row, column, inside = tile(B, H, ROWS, COLS)
    at = t * B + row
    live = real(inside, mask, at, row < B)
    place = at * H + column
    before = (t_before * B + row) * H + column
    h_old, c_old = get(h_before, before, inside, S), get(c_before, before, inside, S)

    summands, norm, where = (u, gx, d, bias), (gate_gain, gate_shift), (row, column, inside, live)
    sums, _ = gates(summands, norm, at, where, B, H, LD_U, EPSILON, S)
    i, f, g, o = sums
    update = kept(tanh(g), keep, (t_keep * B + row) * H + column, live, KEEP_SCALE)
    c_new = sigmoid(f + FORGET_BIAS) * c_old + sigmoid(i) * update
    h_new = output(c_new, o, (c_gain, c_shift), where, H, EPSILON)
    h_new = zoned(h_old, h_new, zone_h, place, live, ZONE_H_RATE)
    c_new = zoned(c_old, c_new, zone_c, place, live, ZONE_C_RATE)
    tl.store(h + place, tl.where(live, h_new, h_old), mask=inside)
    tl.store(c + place, tl.where(live, c_new, c_old), mask=inside)
    if y is not None:
        tl.store(y + place, tl.where(live, h_new, 0.0), mask=inside)


@triton.jit
def arriving(through, direct, dy, zone_h, at, where, H: tl.constexpr, RATE: tl.constexpr, S: tl.constexpr):
    """The gradient that reaches the new h, and the gradient that bypasses the step.

    ``through`` came through matrices, ``direct`` bypassed a later step. ``direct`` is None if no gradient can
    bypass a step; the second result is then meaningless.
    """
    _, column, _, live = where
    place = at * H + column
    new, past = through, through
    if dy is not None:
        new += get(dy, place, live, S)
    if direct is not None:
        stays = staying(zone_h, place, live, RATE, S)
        new += direct
        # Padding has no output, so dy does not count there.
        past = tl.where(live, new * stays, through + direct)
        new *= 1.0 - stays
    return tl.where(live, new, 0.0), past


@triton.jit
def into_gates(
    dh_new, dc_after, c_old, sums, c_norm, update_keep, zone_c, share, place, slot, where,
    H: tl.constexpr, FORGET_BIAS: tl.constexpr, EPSILON: tl.constexpr, KEEP_SCALE: tl.constexpr,
    ZONE_RATE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Gradients of the sums of i, f, g, o and of the old c, from those of the new h and c.

    ``update_keep`` is the dropout mask of the update with its offset. ``share`` points to the factor of the
    gradient of the old c, or is None.
    """
    S: tl.constexpr = dc_after.dtype
    _, column, inside, live = where
    keep, keep_place = update_keep
    i, f, g, o = sums
    i, f, g, o = sigmoid(i), sigmoid(f + FORGET_BIAS), tanh(g), sigmoid(o)
    update = kept(g, keep, keep_place, live, KEEP_SCALE)
    inner, c_normal, c_rstd = normed(0, f * c_old + i * update, c_norm, where, H, EPSILON)
    inner = tanh(inner)
    c_gain, _ = c_norm

    d_o = dh_new * inner * o * (1.0 - o)
    dc_new = dh_new * o * (1.0 - inner * inner)
    if c_gain is not None:
        add_up(slot + 12 * H, dc_new * c_normal, H, COLS)
        add_up(slot + 13 * H, dc_new, H, COLS)
        dc_new = normalise_backward(dc_new * get(c_gain, column, column < H, S), c_normal, c_rstd, inside, H)
    stays = staying(zone_c, place, live, ZONE_RATE, S)
    dc_here = tl.where(live, dc_after, 0.0)
    dc_new += dc_here * (1.0 - stays)
    dc_old = dc_new * f
    if share is not None:
        dc_old *= tl.load(share)
    d_i = dc_new * update * i * (1.0 - i)
    d_f = dc_new * c_old * f * (1.0 - f)
    d_g = kept(dc_new * i, keep, keep_place, live, KEEP_SCALE) * (1.0 - g * g)
    return (d_i, d_f, d_g, d_o), tl.where(live, dc_old + dc_here * stays, dc_after)


@triton.jit
def spread_gate(
    k: tl.constexpr, da, gain, norm, summands, gradients, slot, at, where, B, H: tl.constexpr,
    LD_U: tl.constexpr, LD_DU: tl.constexpr, DD_STEPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``spread`` for gate k."""
    S: tl.constexpr = slot.dtype.element_ty
    u, gx, d = summands
    du, dgx, dd, du_at, dd_at = gradients
    normal, rstd = norm
    row, column, inside, live = where
    if gain is not None:
        add_up(slot + k * H, da * normal, H, COLS)
        add_up(slot + (4 + k) * H, da, H, COLS)
        da = normalise_backward(da * get(gain, k * H + column, column < H, S), normal, rstd, inside, H)
    u_place, du_place = at * LD_U + k * H + column, du_at * LD_DU + k * H + column
    if d is None:
        tl.store(du + du_place, da, mask=inside)
    else:
        x_place = at * 4 * H + k * H + column
        d_h, d_x = (k * B + row) * H + column, ((4 + k) * B + row) * H + column
        tl.store(du + du_place, da * get(d, d_h, live, S), mask=inside)
        tl.store(dgx + x_place, da * get(d, d_x, live, S), mask=inside)
        # ``dd_at`` has 64 bits, and so have offsets that include it.
        dd_h = (k * DD_STEPS * B + dd_at) * H + column
        dd_x = ((4 + k) * DD_STEPS * B + dd_at) * H + column
        db = ((8 + k) * DD_STEPS * B + dd_at) * H + column
        tl.store(dd + dd_h, da * get(u, u_place, live, S), mask=inside)
        tl.store(dd + dd_x, da * get(gx, x_place, live, S), mask=inside)
        tl.store(dd + db, da, mask=inside)
        add_up(slot + (8 + k) * H, da, H, COLS)


@triton.jit
def spread(
    d_gates, gain, normals, summands, gradients, slot, at, where, B,
    H: tl.constexpr, LD_U: tl.constexpr, LD_DU: tl.constexpr, DD_STEPS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Stores the gradients of the summands of all gates.

    ``gradients`` are du, dgx, dd, the row of du, and the row of dd without its kind; dgx and dd are None
    without d.
    """
    d_i, d_f, d_g, d_o = d_gates
    of_i, of_f, of_g, of_o = normals
    reads, writes = summands, gradients
    spread_gate(0, d_i, gain, of_i, reads, writes, slot, at, where, B, H, LD_U, LD_DU, DD_STEPS, COLS)
    spread_gate(1, d_f, gain, of_f, reads, writes, slot, at, where, B, H, LD_U, LD_DU, DD_STEPS, COLS)
    spread_gate(2, d_g, gain, of_g, reads, writes, slot, at, where, B, H, LD_U, LD_DU, DD_STEPS, COLS)
    spread_gate(3, d_o, gain, of_o, reads, writes, slot, at, where, B, H, LD_U, LD_DU, DD_STEPS, COLS)


@triton.jit(do_not_specialize=STEPS)
def backward(
    u, gx, d, bias, gate_gain, gate_shift, c_gain, c_shift, mask, keep, zone_h, zone_c, c_scale, c_before, dy,
    dh, dh_direct, dc, du, dgx, dd, sums, t, t_before, t_keep, t_du, t_dd, B,
    H: tl.constexpr, LD_U: tl.constexpr, LD_DU: tl.constexpr, DD_STEPS: tl.constexpr,
    FORGET_BIAS: tl.constexpr, EPSILON: tl.constexpr, KEEP_SCALE: tl.constexpr, ZONE_H_RATE: tl.constexpr,
    ZONE_C_RATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes du, dgx and dd of step t, updates dh_direct and dc for step t - 1, adds to sums."""
    S: tl.constexpr = dc.dtype.element_ty
    row, column, inside = tile(B, H, ROWS, COLS)
    at = t * B + row
    live = real(inside, mask, at, row < B)
    where = (row, column, inside, live)
    place, own = at * H + column, row * H + column
    keep_place = (t_keep * B + row) * H + column
    slot = sums + tl.program_id(0) * 14 * H
    c_old = get(c_before, (t_before * B + row) * H + column, live, S)

    summands, norm = (u, gx, d, bias), (gate_gain, gate_shift)
    sums_of_gates, normals = gates(summands, norm, at, where, B, H, LD_U, EPSILON, S)
    direct = None
    if dh_direct is not None:
        direct = get(dh_direct, own, inside, S)
    dh_new, past = arriving(get(dh, own, inside, S), direct, dy, zone_h, at, where, H, ZONE_H_RATE, S)
    if dh_direct is not None:
        tl.store(dh_direct + own, past, mask=inside)
    c_norm, update_keep = (c_gain, c_shift), (keep, keep_place)
    share = None
    if c_scale is not None:
        share = c_scale + t
    d_gates, dc_old = into_gates(
        dh_new, get(dc, own, inside, S), c_old, sums_of_gates, c_norm, update_keep, zone_c, share, place,
        slot, where, H, FORGET_BIAS, EPSILON, KEEP_SCALE, ZONE_C_RATE, COLS,
    )  # fmt: skip
    tl.store(dc + own, dc_old, mask=inside)
    read, write = (u, gx, d), (du, dgx, dd, t_du * B + row, t_dd * B + row)
    spread(d_gates, gate_gain, normals, read, write, slot, at, where, B, H, LD_U, LD_DU, DD_STEPS, COLS)
