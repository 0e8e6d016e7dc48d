"""One step of the hypernetwork of a HyperLSTM with its own products as a Triton kernel, forward and backward.

A step is the product with the hypernetwork's state, its LSTM, and the embeddings z from its state. One launch
replaces four in the forward pass and three in the backward pass. Each program works on ROWS sequences.

Arguments have the names of ``buffers.Gated`` (here of the hypernetwork, with N for H) and of
``ops.hyper_lstm``; a missing tensor is None. Further arguments:

    a                   sums of the gates, [T, B, 4 N]: ``u`` of the hypernetwork
    side, LD_SIDE       products of the main network's h, [T, B, 4 N], and elements between their rows
    h_before, c_before  h0 and c0 at the first step, h and c later, read at step t_before
    z, dz, WIDTH        embeddings [T, B, WIDTH] and their gradients
    z_now               embeddings of the step by kind in the state type, [12, B, WIDTH / 12]

COLS, a power of two of at least N and 16, is also the inner width of the products.
"""

import triton
import triton.language as tl

from rhhn_fairseq.ops.triton.functions import get, real, sigmoid, tanh, tile
from rhhn_fairseq.ops.triton.gate_products import back, gate_sums
from rhhn_fairseq.ops.triton.gated_step import arriving, gates, into_gates, output, spread

BLOCK = 64
"""Embeddings that are computed at a time."""

STEPS = ["t", "t_before", "B"]
"""Arguments that Triton must not specialise on: it would recompile for 1 and for multiples of 16."""


@triton.jit
def load_columns(
    weight, first, WIDTH: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, COLS: tl.constexpr
):
    """COLUMNS columns of a matrix [N, WIDTH] from column ``first``, [COLS, COLUMNS], zero beyond it."""
    row, column = tl.arange(0, COLS)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    return tl.load(weight + row * WIDTH + column, mask=(row < N) & (column < WIDTH), other=0.0)


@triton.jit(do_not_specialize=STEPS)
def forward(
    a, side, g_hyper, weight_e, weight_z, bias_z, gate_gain, gate_shift, c_gain, c_shift, mask, h_before,
    c_before, h, c, z, z_now, t, t_before, B,
    N: tl.constexpr, WIDTH: tl.constexpr, LD_SIDE: tl.constexpr, PREVIOUS: tl.constexpr,
    FORGET_BIAS: tl.constexpr, EPSILON: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes a, h, c and z of step t, and z_now."""
    S: tl.constexpr = c.dtype.element_ty
    TYPE: tl.constexpr = h.dtype.element_ty
    row, column, inside = tile(B, N, ROWS, COLS)
    at = t * B + row
    live = real(inside, mask, at, row < B)
    before = (t_before * B + row) * N + column
    e, c_old = get(h_before, before, inside, TYPE), get(c_before, before, inside, S)

    where, norm, summands = (row, column, inside, live), (gate_gain, gate_shift), (g_hyper, side)
    i, f, g, o = gate_sums(a, summands, weight_e, e, norm, at, where, N, LD_SIDE, EPSILON, PRECISION, COLS, S)
    c_new = sigmoid(f + FORGET_BIAS) * c_old + sigmoid(i) * tanh(g)
    e_new = output(c_new, o, (c_gain, c_shift), where, N, EPSILON).to(TYPE)
    e_new = tl.where(live, e_new, e)
    tl.store(h + at * N + column, e_new, mask=inside)
    tl.store(c + at * N + column, tl.where(live, c_new, c_old), mask=inside)

    read = e if PREVIOUS else e_new
    Z: tl.constexpr = WIDTH // 12
    for first in tl.static_range(0, WIDTH, BLOCK):
        place = first + tl.arange(0, BLOCK)[None, :]
        new = tl.dot(read, load_columns(weight_z, first, WIDTH, N, BLOCK, COLS), input_precision=PRECISION)
        new += get(bias_z, place, place < WIDTH, S)
        new = new.to(TYPE)
        tl.store(z + at * WIDTH + place, new, mask=(row < B) & (place < WIDTH))
        if z_now is not None:
            by_kind = (place // Z * B + row) * Z + place % Z
            tl.store(z_now + by_kind, new, mask=(row < B) & (place < WIDTH))


@triton.jit(do_not_specialize=STEPS)
def backward(
    a, weight_e, weight_z, gate_gain, gate_shift, c_gain, c_shift, mask, c_before, dh, dh_direct, dc, du, dz,
    sums, t, t_before, B,
    N: tl.constexpr, WIDTH: tl.constexpr, LD_DU: tl.constexpr, PREVIOUS: tl.constexpr,
    FORGET_BIAS: tl.constexpr, EPSILON: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes du of step t, updates dh, dh_direct and dc for step t - 1, adds to sums."""
    S: tl.constexpr = dc.dtype.element_ty
    TYPE: tl.constexpr = du.dtype.element_ty
    row, column, inside = tile(B, N, ROWS, COLS)
    at = t * B + row
    live = real(inside, mask, at, row < B)
    where = (row, column, inside, live)
    place, slot = at * N + column, sums + tl.program_id(0) * 14 * N
    from_z = tl.zeros([ROWS, COLS], S)
    for first in tl.static_range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        embeddings = tl.load(dz + at * WIDTH + columns, mask=(row < B) & (columns < WIDTH), other=0.0)
        of_block = tl.trans(load_columns(weight_z, first, WIDTH, N, BLOCK, COLS))
        from_z = tl.dot(embeddings, of_block, from_z, input_precision=PRECISION)
    through = get(dh, row * N + column, inside, S)
    if not PREVIOUS:
        through += from_z

    summands, norm, c_norm = (a, None, None, None), (gate_gain, gate_shift), (c_gain, c_shift)
    sums_of_gates, normals = gates(summands, norm, at, where, B, N, 4 * N, EPSILON, S)
    c_old = get(c_before, (t_before * B + row) * N + column, live, S)
    own, direct = row * N + column, None
    if dh_direct is not None:
        direct = get(dh_direct, own, inside, S)
    dh_new, past = arriving(through, direct, None, None, at, where, N, 0.0, S)
    if dh_direct is not None:
        tl.store(dh_direct + own, past, mask=inside)
    d_gates, dc_old = into_gates(
        dh_new, get(dc, own, inside, S), c_old, sums_of_gates, c_norm, (None, place), None, None, place, slot,
        where, N, FORGET_BIAS, EPSILON, 1.0, 0.0, COLS,
    )  # fmt: skip
    tl.store(dc + own, dc_old, mask=inside)
    read, write = (a, None, None), (du, None, None)
    d_sums = spread(d_gates, gate_gain, normals, read, write, slot, at, where, B, N, 4 * N, LD_DU, COLS)
    new = back(d_sums, weight_e, tl.zeros_like(from_z), N, TYPE, PRECISION, COLS)
    if PREVIOUS:
        new += from_z
    tl.store(dh + own, new, mask=inside)
