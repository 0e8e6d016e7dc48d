"""Device functions of the Triton kernels that multiply the state of a small LSTM by its recurrent matrix.

N units; the matrix [N, 4 N] has the columns of the gates i, f, g, o. COLS, a power of two that is not below N
and 16, is also the inner width of the products.
"""

import triton
import triton.language as tl

from rhhn_fairseq.kernels.triton.functions import get
from rhhn_fairseq.kernels.triton.gated_step import normed


@triton.jit
def gate_matrix(weight, k: tl.constexpr, N: tl.constexpr, COLS: tl.constexpr):
    """Gate k's columns, [COLS, COLS], zeros past N."""
    row, column = tl.arange(0, COLS)[:, None], tl.arange(0, COLS)[None, :]
    return tl.load(weight + row * 4 * N + k * N + column, mask=(row < N) & (column < N), other=0.0)


@triton.jit
def gate_sum(
    k: tl.constexpr,
    a,
    parts,
    weight,
    h,
    norm,
    at,
    where,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    COLS: tl.constexpr,
    S: tl.constexpr,
):
    """Gate k's sum, normalised, with the product of the state h; writes it to a [T, B, 4 N] before that.

    ``parts`` are what else is added up, [T, B, 4 N], and more of it or None, with the elements between rows.
    """
    TYPE: tl.constexpr = a.dtype.element_ty
    g, side, LD_SIDE = parts
    _, column, inside, live = where
    of_gate = at * 4 * N + k * N + column
    total = get(g, of_gate, inside, S)
    if side is not None:
        total += get(side, at * LD_SIDE + k * N + column, inside, S)
    total = tl.dot(h, gate_matrix(weight, k, N, COLS), total, input_precision=PRECISION)
    # As the backward pass will read it.
    total = total.to(TYPE)
    tl.store(a + of_gate, total, mask=inside)
    total, _, _ = normed(k, tl.where(live, total.to(S), 0.0), norm, where, N)
    return total


@triton.jit
def back(
    k: tl.constexpr,
    da,
    weight,
    add,
    N: tl.constexpr,
    TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    COLS: tl.constexpr,
):
    """``add`` and the gradient of the state from that of gate k's sum."""
    return tl.dot(da.to(TYPE), tl.trans(gate_matrix(weight, k, N, COLS)), add, input_precision=PRECISION)
