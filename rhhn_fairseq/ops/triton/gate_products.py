"""Device functions of the Triton kernels that multiply the state of a small LSTM by its recurrent matrix.

The matrix [N, 4 N] of N units has the columns of the gates i, f, g, o. COLS, a power of two of at least N and
16, is also the inner width of the products.
"""

import triton
import triton.language as tl

from rhhn_fairseq.ops.triton.functions import get
from rhhn_fairseq.ops.triton.gated_step import normed


@triton.jit
def gate_matrix(weight, k: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr):
    """Gate k's columns, [COLS, COLS], zero beyond N."""
    row, column = tl.arange(0, COLS)[:, None], tl.arange(0, COLS)[None, :]
    return tl.load(weight + row * 4 * N + k * N + column, mask=(row < N) & (column < N), other=0.0)


@triton.jit
def gate_sum(
    k: tl.constexpr, a, summands, weight, h, norm, at, where, N: tl.constexpr, LD_SIDE: tl.constexpr,
    EPSILON: tl.constexpr, PRECISION: tl.constexpr, COLS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Gate k's normalised sum, with the product of h; writes the sum before normalisation to a [T, B, 4 N].

    ``summands`` are two further terms [T, B, 4 N]. The second has LD_SIDE elements between rows, or is None.
    """
    TYPE: tl.constexpr = a.dtype.element_ty
    g, side = summands
    _, column, inside, live = where
    of_gate = at * 4 * N + k * N + column
    total = get(g, of_gate, inside, S)
    if side is not None:
        total += get(side, at * LD_SIDE + k * N + column, inside, S)
    total = tl.dot(h, gate_matrix(weight, k, N, COLS), total, input_precision=PRECISION)
    # The backward pass reads the rounded value.
    total = total.to(TYPE)
    tl.store(a + of_gate, total, mask=inside)
    total, _, _ = normed(k, tl.where(live, total.to(S), 0.0), norm, where, N, EPSILON)
    return total


@triton.jit
def gate_sums(
    a, summands, weight, h, norm, at, where,
    N: tl.constexpr, LD_SIDE: tl.constexpr, EPSILON: tl.constexpr, PRECISION: tl.constexpr,
    COLS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The normalised sums of i, f, g, o; see ``gate_sum``."""
    i = gate_sum(0, a, summands, weight, h, norm, at, where, N, LD_SIDE, EPSILON, PRECISION, COLS, S)
    f = gate_sum(1, a, summands, weight, h, norm, at, where, N, LD_SIDE, EPSILON, PRECISION, COLS, S)
    g = gate_sum(2, a, summands, weight, h, norm, at, where, N, LD_SIDE, EPSILON, PRECISION, COLS, S)
    o = gate_sum(3, a, summands, weight, h, norm, at, where, N, LD_SIDE, EPSILON, PRECISION, COLS, S)
    return i, f, g, o


@triton.jit
def back(
    d_sums, weight, add,
    N: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``add`` plus the gradient of the state, from the gradients of the gates' sums."""
    d_i, d_f, d_g, d_o = d_sums
    add = tl.dot(d_i.to(TYPE), tl.trans(gate_matrix(weight, 0, N, COLS)), add, input_precision=PRECISION)
    add = tl.dot(d_f.to(TYPE), tl.trans(gate_matrix(weight, 1, N, COLS)), add, input_precision=PRECISION)
    add = tl.dot(d_g.to(TYPE), tl.trans(gate_matrix(weight, 2, N, COLS)), add, input_precision=PRECISION)
    return tl.dot(d_o.to(TYPE), tl.trans(gate_matrix(weight, 3, N, COLS)), add, input_precision=PRECISION)
