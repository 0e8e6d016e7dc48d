"""Device functions that the Triton kernels share: tiles, point-wise functions, normalisation, sums.

A program works on a tile of complete rows, [ROWS, COLS], where COLS >= H is a power of two. ``inside`` marks
the elements that exist, ``live`` those at real positions. All arithmetic is in the state type S. The numbers
of a pass are compile-time constants, because Triton rounds other Python floats to float32.
"""

import os

import numpy as np
import torch
import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") == "1":
    # Triton's interpreter, in versions up to 3.6, truncates float32 to bfloat16, where a GPU rounds.
    from triton.runtime import interpreter

    _cast = interpreter.InterpreterBuilder.cast_impl

    def _cast_rounding(self, source, to):
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return _cast(self, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    interpreter.InterpreterBuilder.cast_impl = _cast_rounding


@triton.jit
def tile(B, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Row [ROWS, 1] and column [1, COLS] of the elements of the program's tile, and which of them exist."""
    # Offsets into a whole sequence can be larger than 32 bits.
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLS)[None, :]
    return row, column, (row < B) & (column < H)


@triton.jit
def real(inside, mask, at, exists):
    """The elements at real positions, from the mask [T, B] at ``at``."""
    live = inside
    if mask is not None:
        live = inside & (tl.load(mask + at, mask=exists, other=0) != 0)
    return live


@triton.jit
def get(pointer, place, where, S: tl.constexpr):
    """Loads elements in the state type, zero outside of ``where``."""
    return tl.load(pointer + place, mask=where, other=0.0).to(S)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); NaN stays NaN."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Cephes' approximations for |x| < 0.625, otherwise from exp(2 |x|); NaN stays NaN.

    It uses operations that the interpreter supports; libdevice's tanh needs a GPU.
    """
    size = tl.abs(x)
    square = x * x
    if x.dtype == tl.float64:
        above = (-9.64399179425052238628e-1 * square - 9.92877231001918586564e1) * square
        below = ((square + 1.12811678491632931402e2) * square + 2.23548839060100448583e3) * square
        p = (above - 1.61468768441708447952e3) / (below + 4.84406305325125486048e3)
    else:
        p = -5.70498872745e-3 * square + 2.06390887954e-2
        p = p * square - 5.37397155531e-2
        p = p * square + 1.33314422036e-1
        p = p * square - 3.33332819422e-1
    polynomial = x + x * square * p
    quotient = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, polynomial, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def kept(x, keep, place, live, SCALE: tl.constexpr):
    """Dropout by a mask; returns x if there is no mask."""
    if keep is not None:
        x = tl.where(tl.load(keep + place, mask=live, other=0) != 0, x * SCALE, 0.0)
    return x


@triton.jit
def zoned(old, new, zone, place, live, RATE: tl.constexpr):
    """Zoneout by a mask, or in expectation."""
    if zone is not None:
        new = tl.where(tl.load(zone + place, mask=live, other=0) != 0, old, new)
    else:
        if RATE != 0.0:
            new = new + RATE * (old - new)
    return new


@triton.jit
def staying(zone, place, live, RATE: tl.constexpr, S: tl.constexpr):
    """The share of the old value that zoneout keeps: its mask, or the expectation."""
    if zone is not None:
        share = tl.load(zone + place, mask=live, other=0).to(S)
    else:
        share = tl.full([1, 1], RATE, S)
    return share


@triton.jit
def normalise(x, inside, H: tl.constexpr, EPSILON: tl.constexpr):
    """Normalises each row to mean zero and variance one; also returns 1 / deviation [ROWS, 1]."""
    # A GPU's division is not exact even by one, so the mean of a single unit would differ from the unit.
    mean = tl.sum(tl.where(inside, x, 0.0), axis=1)[:, None] * (1.0 / H)
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=1)[:, None] * (1.0 / H) + EPSILON)
    return centred * rstd, rstd


@triton.jit
def normalise_backward(grad, normal, rstd, inside, H: tl.constexpr):
    """The gradient of x from that of ``normalise(x)``, which must be zero outside of the row."""
    mean = tl.sum(grad, axis=1)[:, None] * (1.0 / H)
    product = tl.sum(grad * normal, axis=1)[:, None] * (1.0 / H)
    return tl.where(inside, rstd * (grad - mean - normal * product), 0.0)


@triton.jit
def add_up(slot, x, H: tl.constexpr, COLS: tl.constexpr):
    """Adds the tile's rows to the H sums of the program's slot, in a fixed order."""
    column = tl.arange(0, COLS)
    place = slot + column
    sums = tl.load(place, mask=column < H, other=0.0)
    tl.store(place, sums + tl.sum(x, axis=0), mask=column < H)
