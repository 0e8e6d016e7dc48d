"""Products of float32 matrices on the CPU: torch's, or what is faster.

The library behind torch's products, MKL, has AVX-512 code for Intel's processors alone. On others with
AVX-512 ``native/matmul.cpp`` is more than twice as fast, so there the backend ``native``, projections,
attention and output layers use it. oneDNN, which torch has for other purposes, lies between the two: the
backend ``aten`` takes its products from there, and so does everything where nothing could be compiled.
``RHHN_MATMUL`` forces one of the three.

Shapes: M rows, K inner width, N columns.
"""

import functools
import logging
import os
from pathlib import Path

import torch
from torch import Tensor

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.kernels import native
from rhhn_fairseq.kernels.precision import matmul_precision

logger = logging.getLogger(__name__)

VARIABLE = "RHHN_MATMUL"
CHOICES = ("native", "onednn", "torch")

CPUINFO = Path("/proc/cpuinfo")

SMALLEST = 1 << 19
"""Multiplications of a product below which calling it costs what it saves."""

SMALLEST_WITH_GRADIENT = 1 << 22
"""The same for an operation that autograd knows, which costs more to call."""

FEWEST_ROWS = 8
"""Rows for which laying a matrix out for one product pays."""

FEWEST_ROWS_BY_COLUMNS = 32
"""The same where the matrix is stored by columns, which takes longer to lay out."""

LARGE_TRANSPOSE = 1 << 19
"""Numbers of a transpose from which copying it with all threads pays."""

COPIED_COLUMNS = 512
"""Columns of a transpose that are copied together: what they are read from stays in the second cache."""

STEPS = 4
"""Products by torch for which copying a transpose pays."""


def available() -> list[str]:
    """Which of ``CHOICES`` there are here, the fastest first where MKL is slow."""
    there = {"native": native.multiplies(), "onednn": _has_onednn(), "torch": True}
    return [word for word in CHOICES if there[word]]


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def forced() -> str | None:
    """What RHHN_MATMUL forces; None if nothing.

    Raises:
        UsageError: it holds another word, or asks for what is not there.
    """
    word = os.environ.get(VARIABLE) or None
    if word not in (None, *CHOICES):
        raise UsageError(f"{VARIABLE}={word} is unknown, choose from {', '.join(CHOICES)}")
    if word not in (None, *available()):
        needs = {"native": "the compiled kernels and a processor with AVX2", "onednn": "a torch with oneDNN"}
        raise UsageError(f"{VARIABLE}={word} needs {needs[word]}")
    return word


@functools.cache
def mkl_is_slow() -> bool:
    """Whether this is a processor with AVX-512 for which MKL has no such code: not one of Intel's."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    vendors = {line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")}
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "GenuineIntel" not in vendors


@functools.cache
def chosen(backend: str) -> str:
    """Which products a backend has in float32; logged. Decided once."""
    word = forced()
    if backend == "aten" and word == "native":
        word = None  # This backend is what runs without compiled code.
    if word is None:
        there = (word for word in available() if word != "native" or backend == "native")
        word = next(there) if mkl_is_slow() else "torch"
    if word != "torch":
        whose = {"native": "compiled code", "onednn": "oneDNN's"}[word]
        logger.info(
            "float32 matrix products of %s on the CPU are %s (%s=torch for torch's)", backend, whose, VARIABLE
        )
    return word


def way(backend: str | None, *parts: Tensor) -> str:
    """Whose products of these operands are: one of ``CHOICES``.

    Args:
        backend: that of the sequence they belong to; None for what ``RHHN_KERNEL`` says.
    """
    backend = backend or os.environ.get("RHHN_KERNEL") or "native"
    others = (
        backend not in ("native", "aten")
        or any(part.dtype != torch.float32 or part.device.type != "cpu" for part in parts)
        # It rounds operands to bfloat16, for which libraries have code for every processor.
        or matmul_precision("cpu") == "medium"
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
    )
    return "torch" if others else chosen(backend)


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
        backend: as for ``way``.
    """
    return multiply(way(backend, x, w) if pays(x, w) else "torch", x, w, out, add)


def multiply(
    whose: str, x: Tensor, w: Tensor, out: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """``mm`` by one of ``CHOICES``."""
    if whose == "native":
        out = x.new_empty(*x.shape[:-1], w.shape[-1]) if out is None else out
        native.matmul(x, w, out, add)
        return out
    if whose == "onednn" and x.dim() == 2:
        return _by_onednn(_dense(x), _dense(w).t(), out, add)
    return _by_torch(x, w, out, add)


def _dense(part: Tensor) -> Tensor:
    """The matrix without gaps, stored by rows or by columns: for others oneDNN has its slowest code alone."""
    return part if part.is_contiguous() or part.t().is_contiguous() else part.contiguous()


def _by_rows(part: Tensor) -> Tensor:
    """The matrix stored by rows. Of a transpose torch alone would make a copy with one thread."""
    if part.is_contiguous() or part.numel() < LARGE_TRANSPOSE:
        return part.contiguous()
    rows = torch.empty_like(part, memory_format=torch.contiguous_format)
    for to, columns in zip(rows.split(COPIED_COLUMNS, 1), part.split(COPIED_COLUMNS, 1), strict=True):
        to.copy_(columns)
    return rows


def _by_onednn(x: Tensor, w_NK: Tensor, out: Tensor | None, add: Tensor | None) -> Tensor:
    """w: [N, K], a plain matrix or one that oneDNN has laid out."""
    bias = add if add is not None and add.dim() == 1 else None
    y = torch.ops.mkldnn._linear_pointwise.default(_by_rows(x), w_NK, bias, "none", [], "")
    if add is not bias:
        return torch.add(y, add, out=y if out is None else out)
    return y if out is None else out.copy_(y)


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
        whose: the one of ``CHOICES`` that multiplies; None for what ``way`` says, of large products.
    """

    def __init__(
        self,
        weight: Tensor,
        T: int,
        B: int,
        backend: str,
        transpose: bool = False,
        whose: str | None = None,
    ):
        self.panels = self.laid = None
        self.weight = weight.transpose(-1, -2) if transpose else weight
        if whose is None:
            whose = way(backend, weight) if B * _size(weight) >= SMALLEST else "torch"
        if whose == "native" and _enough(T * B, self.weight):
            self.panels = native.Panels(self.weight)
        elif whose == "onednn" and weight.dim() == 2:
            w_NK = _by_rows(self.weight.t())
            self.laid = torch.ops.mkldnn._reorder_linear_weight.default(w_NK, B)
        elif transpose and T >= STEPS:
            # A product reads rows faster.
            self.weight = self.weight.contiguous()

    def product(self, x: Tensor, out: Tensor, add: Tensor | None = None) -> None:
        """Writes ``add + x @ weight`` to ``out``; add may be ``out``."""
        if self.panels is not None:
            self.panels.product(x, out, add)
        elif self.laid is not None:
            _by_onednn(_dense(x), self.laid, out, add)
        else:
            _by_torch(x, self.weight, out, add)


def differentiable(x: Tensor, w: Tensor, add: Tensor | None) -> Tensor | None:
    """``add + x @ w`` with its gradients; None where torch's product is as good.

    Args: as ``mm``.
    """
    parts = (x, w) if add is None else (x, w, add)
    large = len(x) * w.numel() >= SMALLEST_WITH_GRADIENT and pays(x, w)
    return _matmul(x, w, add) if large and way(None, *parts) != "torch" else None


@torch.library.custom_op("rhhn::matmul", mutates_args=())
def _matmul(x: Tensor, w: Tensor, add: Tensor | None) -> Tensor:
    return multiply(way(None, x, w), x, w, add=None if add is None else add.contiguous())


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
