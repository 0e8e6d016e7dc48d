"""Many steps of a small recurrent highway network in one Triton kernel, forward and backward.

Sequences of a batch are independent, so each program runs ROWS of them through all layers of these steps. The
state, or its gradient, stays in registers, and no program waits for another. The matrix of a step is loaded
while the previous step computes. The hypernetwork of a HyperRHN is such a network; without this kernel its
steps would take as many launches as those of the main network.

Arguments have the names and shapes of ``buffers.Highway``; a missing tensor is None. Further arguments:

    weights      W_l of all layers, [L, H, 2 H], of the operands' type
    gal          factors of the state before its product, [B, H]
    share        factors of the gradient through layer 0's product, [T]
    D            number of steps that du holds
    START, STOP  the first step, and the step after the last

There is no z, and layer 0 always takes its bias. The order of halves is h, t. COLS, a power of two of at
least H and 16, is also the inner width of the products.
"""

import triton
import triton.language as tl

from rhhn_fairseq.ops.triton.functions import (
    dropped,
    get,
    kept,
    real,
    sigmoid,
    staying,
    tanh,
    tile,
    zoned,
)

STEPS = ["T", "B", "D", "START", "STOP"]
"""Arguments that Triton must not specialise on: it would recompile for 1 and for multiples of 16."""


@triton.jit
def matrix(weights, layer, half: tl.constexpr, H: tl.constexpr, COLS: tl.constexpr):
    """Half of a layer's matrix, [COLS, COLS], zero beyond H."""
    row, column = tl.arange(0, COLS)[:, None], tl.arange(0, COLS)[None, :]
    place = (layer * H + row) * 2 * H + half * H + column
    return tl.load(weights + place, mask=(row < H) & (column < H), other=0.0)


@triton.jit
def total(u, gx, bias, half: tl.constexpr, at, layer, column, live, H: tl.constexpr):
    """Half of the sums from its product u, which counts at real positions only."""
    S: tl.constexpr = u.dtype
    a = tl.where(live, u, 0.0)
    a += get(gx, at * 2 * H + half * H + column, live & (layer == 0), S)
    return a + get(bias, layer * 2 * H + half * H + column, column < H, S)


@triton.jit(do_not_specialize=STEPS)
def forward(
    u, gx, weights, bias, mask, keep, zone, gal, s0, s, o, y, T, B, START, STOP,
    H: tl.constexpr, L: tl.constexpr, LD_Y: tl.constexpr, KEEP_SCALE: tl.constexpr, ZONE_RATE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes u, s, o and y of all layers of the steps."""
    S: tl.constexpr = s.dtype.element_ty
    TYPE: tl.constexpr = u.dtype.element_ty
    row, column, inside = tile(B, H, ROWS, COLS)
    own = row * H + column
    before = ((L - 1) * T + START - 1) * B + row
    state = get(s0, own, inside & (START == 0), S) + get(s, before * H + column, inside & (START > 0), S)
    start = state
    for n in tl.range(START * L, STOP * L):
        t, layer = n // L, n % L
        last = layer == L - 1
        at, place = t * B + row, (layer * T + t) * B + row
        live = real(inside, mask, at, row < B)
        start = tl.where(layer == 0, state, start)

        seen = dropped(state, gal, own, inside, TYPE)
        h = tl.dot(seen, matrix(weights, layer, 0, H, COLS), input_precision=PRECISION).to(TYPE)
        gate = tl.dot(seen, matrix(weights, layer, 1, H, COLS), input_precision=PRECISION).to(TYPE)
        tl.store(u + place * 2 * H + column, h, mask=inside)
        tl.store(u + place * 2 * H + H + column, gate, mask=inside)
        h = tanh(total(h.to(S), gx, bias, 0, at, layer, column, live, H))
        gate = sigmoid(total(gate.to(S), gx, bias, 1, at, layer, column, live, H))
        new = (1.0 - gate) * state + kept(gate, keep, (at * L + layer) * H + column, live, KEEP_SCALE) * h
        new = tl.where(last, zoned(start, new, zone, at * H + column, live & last, ZONE_RATE), new)
        # If y holds one layer only, it is the last one.
        in_row = column if LD_Y == H else layer * H + column
        written = inside & (last | (LD_Y != H))
        tl.store(y + at * LD_Y + in_row, tl.where(live, new, 0.0), mask=written)
        state = tl.where(live, new, tl.where(last, start, 0.0))
        tl.store(s + place * H + column, state, mask=inside)
        if o is not None:
            tl.store(o + place * H + column, state, mask=inside)


@triton.jit(do_not_specialize=STEPS)
def backward(
    u, gx, weights, bias, mask, keep, zone, gal, share, s0, s, dy, ds, ds_direct, du, dgx, T, B, D, START,
    STOP,
    H: tl.constexpr, L: tl.constexpr, LD_Y: tl.constexpr, KEEP_SCALE: tl.constexpr, ZONE_RATE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes du and dgx of all layers of the steps; updates ds and ds_direct for the step before START."""
    S: tl.constexpr = s.dtype.element_ty
    TYPE: tl.constexpr = u.dtype.element_ty
    row, column, inside = tile(B, H, ROWS, COLS)
    own = row * H + column
    direct, through = get(ds_direct, own, inside, S), get(ds, own, inside, S)
    past = tl.zeros_like(direct)
    for ago in tl.range((STOP - START) * L):
        n = STOP * L - 1 - ago
        t, layer = n // L, n % L
        first, last = layer == 0, layer == L - 1
        at, place = t * B + row, (layer * T + t) * B + row
        live = real(inside, mask, at, row < B)
        grad = direct + through
        arriving = grad
        if dy is not None:
            in_row = column if LD_Y == H else layer * H + column
            grad += get(dy, at * LD_Y + in_row, live & (last | (LD_Y != H)), S)
        grad = tl.where(live, grad, 0.0)
        stays = staying(zone, at * H + column, live & last, ZONE_RATE, S)
        past = tl.where(last, tl.where(live, grad * stays, arriving), past)
        grad = tl.where(last, grad * (1.0 - stays), grad)

        # The state that the layer read: of the layer below, of the step before, or the initial one.
        below = tl.where(first, ((L - 1) * T + t - 1) * B, ((layer - 1) * T + t) * B) + row
        old = get(s, below * H + column, live & (n > 0), S) + get(s0, own, live & (n == 0), S)
        h = get(u, place * 2 * H + column, live, S)
        gate = get(u, place * 2 * H + H + column, live, S)
        h = tanh(total(h, gx, bias, 0, at, layer, column, live, H))
        gate = sigmoid(total(gate, gx, bias, 1, at, layer, column, live, H))
        keep_place = (at * L + layer) * H + column
        d_h = grad * kept(gate, keep, keep_place, live, KEEP_SCALE) * (1.0 - h * h)
        d_gate = (kept(grad * h, keep, keep_place, live, KEEP_SCALE) - grad * old) * gate * (1.0 - gate)
        direct = grad * (1.0 - gate) + tl.where(first, past, 0.0)

        d_h, d_gate = d_h.to(TYPE), d_gate.to(TYPE)
        in_du = ((layer * D + t % D) * B + row) * 2 * H + column
        tl.store(du + in_du, d_h, mask=inside)
        tl.store(du + in_du + H, d_gate, mask=inside)
        tl.store(dgx + at * 2 * H + column, d_h, mask=inside & first)
        tl.store(dgx + at * 2 * H + H + column, d_gate, mask=inside & first)
        seen = tl.dot(d_h, tl.trans(matrix(weights, layer, 0, H, COLS)), input_precision=PRECISION)
        seen = tl.dot(d_gate, tl.trans(matrix(weights, layer, 1, H, COLS)), seen, input_precision=PRECISION)
        through = dropped(seen, gal, own, inside, TYPE).to(S)
        if share is not None:
            through = (through * tl.where(first, tl.load(share + t), 1.0)).to(TYPE).to(S)
    tl.store(ds_direct + own, direct, mask=inside)
    tl.store(ds + own, through, mask=inside)
