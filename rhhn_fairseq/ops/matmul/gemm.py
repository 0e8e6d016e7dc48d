"""Matrix products in float32 on the CPU: torch's, or this package's own where torch's library is slow.

MKL, the library behind torch's products, has AVX-512 code for Intel processors only. On other processors with
AVX-512 the products of ``native/matmul.cpp`` are more than twice as fast. The processor decides and not a
measurement at start, so runs repeat. ``RHHN_MATMUL`` forces either. Other types and devices always use torch.

The first rule that applies to a product decides:

- 2 to 8 rows without a gradient, and a matrix of ``FEW_ROWS_SMALLEST`` numbers or more, on a processor with
  AVX2: this package's few-row product, which reads the matrix once, for steps of decoding.
- ``ROWS`` rows or more and ``SMALLEST`` multiplications or more, where MKL is slow: this package's product.
- Otherwise: torch's product.

Shapes: M rows, K inner width, N columns.
"""

import functools
import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import native, policy
from rhhn_fairseq.ops.library import operation
from rhhn_fairseq.ops.matmul.quantised import QuantisedWeight

logger = logging.getLogger(__name__)

PRECISION = "RHHN_MATMUL_PRECISION"
PRECISIONS = ("highest", "high", "medium")

CPUINFO = Path("/proc/cpuinfo")

SMALLEST = 1 << 19
"""Multiplications from which this package's product saves more time than its call costs."""

SMALLEST_WITH_GRADIENT = 1 << 22
"""The same for ``affine``: an operation that autograd records costs more to call."""

ROWS, ROWS_BY_COLUMNS = 8, 32
"""Rows from which packing a matrix for one product pays off; the second if it is stored by columns."""

FEW_ROWS_SMALLEST, FEW_ROWS_INPUT = 1 << 17, 64
"""Numbers and rows of a matrix below which torch computes a few-row product."""

SMALLEST_PRODUCT = 2 * FEW_ROWS_SMALLEST
"""Multiplications below which ``affine`` always takes torch's product."""

PLAIN = torch._C._disabled_torch_dispatch_impl
"""``__torch_dispatch__`` of tensors with numbers at their address; a subclass with another may have none."""

Matrix = Tensor | QuantisedWeight
"""A weight [K, N]."""


class ScaledWeight(NamedTuple):
    """A matrix [K, N] whose columns are scaled by different factors for each row that it multiplies."""

    weight_KN: Matrix
    scale_MN: Tensor


def transformation() -> str | None:
    """Returns in words what transforms operations beyond a backward pass; None if nothing does."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func"
    return "forward-mode differentiation" if forward_ad._current_level >= 0 else None


STEPS = 4
"""Steps from which copying a transpose for torch's products pays off."""


def matmul_precision(device_type: str) -> str:
    """Returns the precision of torch's float32 products on a device type: one of ``PRECISIONS``."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # Torch's newer settings, one for each library, are in use. The older function then raises an error.
        library = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        return {"tf32": "high", "bf16": "medium"}.get(library.matmul.fp32_precision, "highest")


def set_matmul_precision() -> None:
    """Sets the precision of torch's float32 matrix products to RHHN_MATMUL_PRECISION and logs it.

    ``medium`` rounds operands to bfloat16 inside the product (on a GPU at least to TF32). Sums, results and
    everything between the products stay float32. This is several times faster on CPUs with AMX. If the
    variable is unset, torch's own setting, which is full float32, stays.

    Raises:
        UsageError: the variable has an unknown value.
    """
    value = os.environ.get(PRECISION)
    if not value:
        return
    if value not in PRECISIONS:
        raise UsageError(f"{PRECISION}={value} is unknown, choose from {', '.join(PRECISIONS)}")
    torch.set_float32_matmul_precision(value)
    logger.info("float32 matrix products run at precision %r (%s)", value, PRECISION)


@functools.cache
def mkl_is_slow() -> bool:
    """Whether MKL lacks AVX-512 code for this processor: it has AVX-512 and is not Intel's."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return False
    vendors = {line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")}
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "GenuineIntel" not in vendors


def check_policy() -> None:
    """Raises UsageError if RHHN_MATMUL asks for what this machine lacks."""
    if policy.current().matmul == "native" and not native.multiplies():
        raise UsageError("RHHN_MATMUL=native needs the compiled kernels and a processor with AVX2")


@functools.cache
def preferred(asked: str | None) -> str:
    """Returns the implementation of large float32 products on this processor; logs it once."""
    check_policy()
    gemm = asked or ("native" if mkl_is_slow() and native.multiplies() else "torch")
    if gemm != "torch":
        logger.info(
            "float32 products on the CPU use this package's compiled code (RHHN_MATMUL=torch selects torch)"
        )
    return gemm


def select_gemm(dtype: torch.dtype, device: torch.device) -> str:
    """Returns the implementation of large products of a type on a device: one of ``policy.GEMMS``."""
    if dtype != torch.float32 or device.type != "cpu" or not _is_plain():
        return "torch"
    asked = policy.current()
    return preferred(asked.matmul) if asked.kernel in (None, "native", "torch_nn") else "torch"


def _is_plain() -> bool:
    """Whether float32 products run as such: nothing rounds their operands, and nothing traces them."""
    # Libraries have code for bfloat16 operands on every processor.
    return not (
        torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        # Fake tensors, make_fx and counters of operations see torch's operations only.
        or torch._C._len_torch_dispatch_stack() > 0
        or transformation() is not None
        or matmul_precision("cpu") == "medium"
    )


def is_large(x: Tensor, w: Tensor) -> bool:
    """Whether a product [M, K] by [K, N] is large enough, with rows enough to make packing w pay off."""
    M, K, N = x.shape[-2], w.shape[-2], w.shape[-1]
    return M * K * N >= SMALLEST and M >= (ROWS if w.stride(-1) == 1 else ROWS_BY_COLUMNS)


def mm(
    x: Tensor, w: Tensor, out: Tensor | None = None, add: Tensor | None = None, gemm: str = "torch"
) -> Tensor:
    """Computes ``add + x @ w`` without a gradient.

    Args:
        x: [M, K]. w: [K, N]. Either may be a transpose. Both may be stacks of L matrices.
        out: where the result is written, [M, N], or [L, M, N] for stacks; None for a new tensor.
        add: [N] (not for stacks) or of the shape of ``out``; may be ``out`` itself; None to add nothing.
        gemm: the result of ``select_gemm``; torch computes small products in any case.
    """
    # A traced pass chooses without knowing the types of its operands.
    if gemm == "native" and x.dtype == w.dtype == torch.float32 and is_large(x, w):
        out = x.new_empty(*x.shape[:-1], w.shape[-1]) if out is None else out
        if x.dim() == 2:
            native.matmul(x, w, out, add)
            return out
        for layer, product in enumerate(out):
            native.matmul(x[layer], w[layer], product, None if add is None else add[layer])
        return out
    if x.dim() == 2:
        return torch.mm(x, w, out=out) if add is None else torch.addmm(add, x, w, out=out)
    return torch.bmm(x, w, out=out) if add is None else torch.baddbmm(add, x, w, out=out)


class PackedWeight:
    """A matrix [K, N], packed for the products of all steps of a sequence.

    Args:
        weight: [K, N], or with ``transpose`` [N, K].
        T, B: number of steps, and rows of each.
        gemm: the result of ``select_gemm``.
    """

    def __init__(self, weight: Tensor, T: int, B: int, gemm: str, transpose: bool = False):
        self.weight = weight.t() if transpose else weight
        rows = ROWS if self.weight.stride(-1) == 1 else ROWS_BY_COLUMNS
        large = B * weight.numel() >= SMALLEST and T * B >= rows
        self.is_native = gemm == "native" and weight.dtype == torch.float32 and large
        if self.is_native:
            self.panels = native.pack_if_faster(self.weight)
        elif transpose and T >= STEPS:
            # Products read a matrix faster by rows.
            self.weight = self.weight.contiguous()

    def product(self, x: Tensor, out: Tensor, add: Tensor | None = None) -> None:
        """Writes ``add + x @ weight`` to ``out``; add may be ``out``."""
        if self.is_native:
            native.matmul(x, self.weight, out, add, self.panels)
        else:
            mm(x, self.weight, out, add)


def affine(
    x: Tensor, weight_KN: Matrix | ScaledWeight, add: Tensor | None = None, gemm: str | None = None
) -> Tensor:
    """Computes ``x @ weight + add``, with gradients, by the faster product. Cells and layers call this.

    Args:
        x: [..., K]. weight_KN: [K, N]; a quantised one has no gradient, a scaled one only takes x of [M, K].
        add: [N], or [M, N] for an x of M rows; None to add nothing.
        gemm: the result of ``select_gemm`` for these operands; None to select here.
    """
    if isinstance(weight_KN, ScaledWeight):
        product, scale = affine(x, weight_KN.weight_KN, None, gemm), weight_KN.scale_MN
        return product * scale if add is None else torch.addcmul(add, product, scale)
    if isinstance(weight_KN, QuantisedWeight):
        y = weight_KN(x)
        return y if add is None else y + add
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y = None
    # Traced sizes may be symbolic; comparing them would fix their values.
    is_plain = gemm != "torch" and weight_KN.dtype == torch.float32 and not torch.compiler.is_compiling()
    if is_plain and rows.shape[0] * weight_KN.numel() >= SMALLEST_PRODUCT:
        y = _try_native(rows, weight_KN, add, gemm)
    if y is None:
        if add is None:
            return x @ weight_KN
        y = torch.addmm(add, rows, weight_KN)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _try_native(x: Tensor, w: Tensor, add: Tensor | None, gemm: str | None) -> Tensor | None:
    """Computes ``affine`` of rows [M, K] in compiled code; None if torch has to compute or reject it."""
    (M, K), (inner, N) = x.shape, w.shape
    for operand in (x, w) if add is None else (x, w, add):
        if operand.dtype != torch.float32 or operand.device.type != "cpu":
            return None
        if type(operand).__torch_dispatch__ is not PLAIN:
            return None
    # Torch rejects, or broadcasts, shapes that do not fit.
    if inner != K or (add is not None and add.shape not in ((N,), (M, N))):
        return None
    if M <= native.FEW_ROWS[-1] and not torch.is_grad_enabled() and fits_few_rows(x, w):
        out = x.new_empty(M, N)
        native.multiply_few_rows(x.contiguous(), w, out, None if add is None else add.contiguous())
        return out
    if M * K * N < SMALLEST_WITH_GRADIENT or not is_large(x, w):
        return None
    if gemm is None and select_gemm(w.dtype, w.device) == "torch":
        return None
    return _matmul(x, w, add)


def fits_few_rows(x: Tensor, w: Tensor) -> bool:
    """Whether compiled code is faster for a product [M, K] by [K, N] of ``native.FEW_ROWS`` rows.

    w may be on the meta device, as of a model that is described.
    """
    asked = policy.current()
    return (
        len(x) in native.FEW_ROWS
        and w.numel() >= FEW_ROWS_SMALLEST
        and w.shape[0] >= FEW_ROWS_INPUT
        and 1 in w.stride()
        and x.dtype == w.dtype == torch.float32
        and x.device.type == "cpu"
        and w.device.type in ("cpu", "meta")
        and type(x).__torch_dispatch__ is type(w).__torch_dispatch__ is PLAIN
        and asked.kernel in (None, "native")
        and asked.matmul in (None, "native")
        and native.multiplies()
        and _is_plain()
    )


@operation("rhhn::matmul")
def _matmul(x: Tensor, w: Tensor, add: Tensor | None) -> Tensor:
    out = x.new_empty(len(x), w.shape[1])
    native.matmul(x, w, out, None if add is None else add.contiguous())
    return out


@torch.library.register_fake(_matmul)
def _(x, w, add):
    return x.new_empty(len(x), w.shape[1])


def _context(ctx, inputs, output):
    x, w, add = inputs
    ctx.save_for_backward(x, w)
    ctx.adds_rows = add is not None and add.dim() == 2


def _gradients(ctx, dy):
    x, w = ctx.saved_tensors
    for_x, for_w, for_add = ctx.needs_input_grad
    dadd = None
    if for_add:
        dadd = dy if ctx.adds_rows else dy.sum(0)
    return _multiply(dy, w.t()) if for_x else None, _multiply(x.t(), dy) if for_w else None, dadd


def _multiply(x: Tensor, w: Tensor) -> Tensor:
    """Computes a product of the backward pass, which can be differentiated again."""
    return _matmul(x, w, None) if is_large(x, w) else x @ w


torch.library.register_autograd(_matmul, _gradients, setup_context=_context)
