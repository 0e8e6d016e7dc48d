"""Products of float32 matrices on the CPU: torch's, or compiled code of this package where that is faster.

The library behind torch's products, MKL, has AVX-512 code for Intel's processors alone. On others with
AVX-512 ``native/matmul.cpp`` is about twice as fast, so there the backend ``native``, projections, attention
and output layers use it. ``RHHN_MATMUL`` forces one or the other.

Shapes: M rows, K inner width, N columns.
"""

import functools
import logging
import os

import torch
from torch import Tensor

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.kernels import native

logger = logging.getLogger(__name__)

VARIABLE = "RHHN_MATMUL"
CHOICES = ("native", "torch")

SMALLEST = 1 << 19
"""Multiplications of a product below which calling it costs what it saves."""

SMALLEST_WITH_GRADIENT = 1 << 22
"""The same for an operation that autograd knows, which costs more to call."""

FEWEST_ROWS = 8
"""Rows for which laying a matrix out for one product pays."""

FEWEST_ROWS_BY_COLUMNS = 32
"""The same where the matrix is stored by columns, which takes longer to lay out."""

STEPS = 4
"""Products by torch for which copying a transpose pays."""


def forced() -> str | None:
    """What RHHN_MATMUL forces; None if nothing.

    Raises:
        UsageError: it holds another word, or asks for compiled code that is not there.
    """
    word = os.environ.get(VARIABLE) or None
    if word not in (None, *CHOICES):
        raise UsageError(f"{VARIABLE}={word} is unknown, choose from {', '.join(CHOICES)}")
    if word == "native" and not native.multiplies():
        raise UsageError(f"{VARIABLE}=native needs the compiled kernels and a processor with AVX2")
    return word


@functools.cache
def chosen() -> bool:
    """Whether products are this package's; logged. Decided once."""
    ours = native.outruns_libraries() if forced() is None else forced() == "native"
    if ours:
        logger.info("float32 matrix products on the CPU are compiled code (%s=torch for torch's)", VARIABLE)
    return ours


def ours(backend: str | None, *parts: Tensor) -> bool:
    """Whether products of these operands are this package's.

    Args:
        backend: that of the sequence they belong to; None for what ``RHHN_KERNEL`` says.
    """
    return (
        (backend or os.environ.get("RHHN_KERNEL") or "native") == "native"
        and all(part.dtype == torch.float32 and part.device.type == "cpu" for part in parts)
        # It rounds operands to bfloat16, for which libraries have code for every processor.
        and torch.get_float32_matmul_precision() != "medium"
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and chosen()
    )


def pays(x: Tensor, w: Tensor) -> bool:
    """Whether a product [M, K] by [K, N] is large enough, and its rows enough to lay w out for them."""
    rows = x.shape[-2]
    return _enough(rows, w) and rows * _size(w) >= SMALLEST


def _size(w: Tensor) -> int:
    """Numbers of a matrix, or of one of a stack."""
    return w.shape[-2] * w.shape[-1]


def _enough(rows: int, w: Tensor) -> bool:
    return rows >= (FEWEST_ROWS if w.stride(-1) == 1 else FEWEST_ROWS_BY_COLUMNS)


def mm(
    x: Tensor, w: Tensor, out: Tensor | None = None, add: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """``add + x @ w`` without a gradient.

    Args:
        x: [M, K]. w: [K, N]. Either may be a transpose. Or stacks of L of them.
        out: [M, N], of stacks [L, M, N], what it is written to; None for a new one.
        add: [N], but not for a stack, or as ``out``, which it may be; None for nothing.
        backend: as for ``ours``.
    """
    if ours(backend, x, w) and pays(x, w):
        out = x.new_empty(*x.shape[:-1], w.shape[-1]) if out is None else out
        native.matmul(x, w, out, add)
        return out
    return _by_torch(x, w, out, add)


def _by_torch(x: Tensor, w: Tensor, out: Tensor | None, add: Tensor | None) -> Tensor:
    if x.dim() == 2:
        return torch.mm(x, w, out=out) if add is None else torch.addmm(add, x, w, out=out)
    return torch.bmm(x, w, out=out) if add is None else torch.baddbmm(add, x, w, out=out)


class Factor:
    """A matrix [K, N] that every step of a sequence multiplies its rows with, laid out for that; or a stack.

    Args:
        weight: [K, N], of a stack [L, K, N]; with ``transpose`` [N, K] or [L, N, K].
        T, B: steps, and rows of each.
        backend: that of the sequence.
    """

    def __init__(self, weight: Tensor, T: int, B: int, backend: str, transpose: bool = False):
        self.panels = None
        self.weight = weight.transpose(-1, -2) if transpose else weight
        if ours(backend, weight) and _enough(T * B, self.weight) and B * _size(weight) >= SMALLEST:
            self.panels = native.Panels(self.weight)
        elif transpose and T >= STEPS:
            # A product reads rows faster.
            self.weight = self.weight.contiguous()

    def product(self, x: Tensor, out: Tensor, add: Tensor | None = None) -> None:
        """Writes ``add + x @ weight`` to ``out``; add may be ``out``."""
        if self.panels is None:
            _by_torch(x, self.weight, out, add)
        else:
            self.panels.product(x, out, add)


def differentiable(x: Tensor, w: Tensor, add: Tensor | None) -> Tensor | None:
    """``add + x @ w`` with its gradients; None where torch's product is as good.

    Args: as ``mm``.
    """
    parts = (x, w) if add is None else (x, w, add)
    large = len(x) * w.numel() >= SMALLEST_WITH_GRADIENT and pays(x, w)
    return _matmul(x, w, add) if large and ours(None, *parts) else None


@torch.library.custom_op("rhhn::matmul", mutates_args=())
def _matmul(x: Tensor, w: Tensor, add: Tensor | None) -> Tensor:
    y = x.new_empty(len(x), w.shape[1])
    native.matmul(x, w, y, None if add is None else add.contiguous())
    return y


@_matmul.register_fake
def _(x, w, add):
    return x.new_empty(len(x), w.shape[1])


def _context(ctx, inputs, output):
    x, w, add = inputs
    ctx.save_for_backward(x, w)
    ctx.rows_added = add is not None and add.dim() == 2


def _gradients(ctx, dy):
    x, w = ctx.saved_tensors
    for_x, for_w, for_add = ctx.needs_input_grad
    dadd = None
    if for_add:
        dadd = dy if ctx.rows_added else dy.sum(0)
    return _product(dy, w.t()) if for_x else None, _product(x.t(), dy) if for_w else None, dadd


def _product(x: Tensor, w: Tensor) -> Tensor:
    return _matmul(x, w, None) if pays(x, w) else x @ w


_matmul.register_autograd(_gradients, setup_context=_context)
