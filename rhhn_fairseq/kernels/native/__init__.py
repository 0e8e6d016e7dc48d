"""The point-wise part of a time step, and products of a few rows, as compiled C++ for the CPU.

The library is built with the package, three times for x86 (for AVX-512, for AVX2 and for any processor), and
the one this processor can run is loaded. It knows nothing of torch: it gets the addresses of buffers that
a sequence program holds, once a sequence, and then the number of the step.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from rhhn_fairseq.kernels.buffers import Energy, Gated, Highway

LEVELS = {"AVX512": ("avx512", "avx2", "any"), "AVX2": ("avx2", "any")}
"""The builds that a processor can run, best first, by torch's name of what it can do."""

DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
"""The types of operands there are functions for."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where they were not built."""
    for level in LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("any",)):
        for suffix in EXTENSION_SUFFIXES:
            path = Path(__file__).with_name(f"_{level}{suffix}")
            if path.is_file():
                return ctypes.CDLL(str(path))
    return None


def _fields(spec: str, kind) -> list[tuple]:
    return [(name, kind) for name in spec.split()]


class _Gated(ctypes.Structure):
    """``struct Gated`` of gated.h."""

    _fields_ = [
        *_fields("T B H Z ld_u ld_du keep_t keep_b", ctypes.c_int64),
        *_fields("forget_bias epsilon keep_scale zone_h_rate zone_c_rate", ctypes.c_double),
        *_fields("threads", ctypes.c_int64),
        *_fields("u gx z weight_d bias gate_gain gate_shift c_gain c_shift", ctypes.c_void_p),
        *_fields("mask keep zone_h zone_c c_scale h0 c0 h c y", ctypes.c_void_p),
        *_fields("dy dh dh_direct dc du dgx dz dweight_d sums", ctypes.c_void_p),
    ]


class _Highway(ctypes.Structure):
    """``struct Highway`` of highway.cpp."""

    _fields_ = [
        *_fields("T B H L D Z ld_y", ctypes.c_int64),
        *_fields("keep_scale zone_rate", ctypes.c_double),
        *_fields("threads", ctypes.c_int64),
        *_fields("u gx z bias bias_x bias_z first mask keep zone s0 s o y", ctypes.c_void_p),
        *_fields("dy ds ds_direct past du dgx dz sums", ctypes.c_void_p),
    ]


class _Recurrence(ctypes.Structure):
    """``struct Recurrence`` of sequence.h."""

    _fields_ = [*_fields("weights gal share", ctypes.c_void_p), *_fields("start stop", ctypes.c_int64)]


class _HyperRecurrence(ctypes.Structure):
    """``struct HyperRecurrence`` of hyper_sequence.cpp."""

    _fields_ = [
        ("previous", ctypes.c_int64),
        *_fields("weight weight_e weight_z bias_z g_hyper gal share", ctypes.c_void_p),
    ]


class _Product(ctypes.Structure):
    """``struct Product`` of product.cpp."""

    _fields_ = [
        *_fields("M K N ld_w ld_add threads", ctypes.c_int64),
        *_fields("x w add y", ctypes.c_void_p),
    ]


class _Matmul(ctypes.Structure):
    """``struct Matmul`` of matmul.cpp."""

    _fields_ = [
        *_fields("stack M K N stack_x stack_w stack_add stack_y", ctypes.c_int64),
        *_fields("ld_x next_x ld_w next_w ld_add ld_y threads", ctypes.c_int64),
        *_fields("x w panels add y", ctypes.c_void_p),
    ]


class _Energy(ctypes.Structure):
    """``struct Energy`` of energy.cpp."""

    _fields_ = [
        *_fields("B R S A H threads", ctypes.c_int64),
        *_fields("q k v mask e de dq dk dv", ctypes.c_void_p),
    ]


def has_sequences(buffers: Gated | Highway) -> bool:
    """Whether the functions that run many steps in one call are there for these."""
    return buffers.u.dtype == torch.float32 and multiplies()


def lstm_sequence(
    buffers: Gated, direction: str, weight: Tensor, gal: Tensor | None, share: Tensor | None
) -> None:
    """Runs all steps of an LSTM without a hypernetwork, with their products.

    Args:
        buffers: those of the steps, with ``gx`` for what the products are added to.
        direction: forward or backward.
        weight: the recurrent matrix, [H, 4 H].
        gal: scaled mask on h, [B, H]; None for no dropout.
        share: [T], what the gradient of h through the matrix is multiplied by; None for one.
    """
    call = _bind(f"lstm_sequence_{direction}", _Gated, buffers, _gated_sizes(buffers))
    _of_steps(call, direction, [weight], gal, share)(0, len(buffers.h))


def hyper_lstm_sequence(
    main: Gated,
    hyper: Gated,
    direction: str,
    g_hyper: Tensor | None,
    weights: "Laid",
    bias_z: Tensor | None,
    gal: Tensor | None,
    share: Tensor | None,
    previous: bool,
) -> None:
    """The same for a HyperLSTM; see ``hyper_gated.hyper_lstm`` for the names.

    Args:
        main, hyper: the buffers of either network. The main network's rows of u and du go on with the
            hypernetwork's products of h and their gradients.
        g_hyper: what the hypernetwork's sums begin with, [T, B, 4 N].
        weights: both matrices of h side by side, [H, 4 (H + N)], weight_e and weight_z, for this direction.
        bias_z: [12 Z]. It and ``g_hyper`` may be None in the backward pass, which does not need them.
    """
    addresses = (None if part is None else _address("", part) for part in (bias_z, g_hyper, gal, share))
    recurrence = _HyperRecurrence(previous, *(part.data_ptr() for part in weights.panels), *addresses)
    arguments = [_arguments(_Gated, buffers, _gated_sizes(buffers)) for buffers in (main, hyper)]
    call = getattr(library(), f"hyper_lstm_sequence_{direction}")
    call(*(ctypes.byref(part) for part in (*arguments, recurrence)))


class Laid:
    """Matrices for ``hyper_lstm_sequence``, laid out when they are first asked for; they must not change.

    Args:
        matrices: what ``panels`` has, one by one.
        direction: forward or backward.
    """

    def __init__(self, matrices: Sequence[Tensor], direction: str):
        self.matrices, self.direction = matrices, direction

    @functools.cached_property
    def panels(self) -> list[Tensor]:
        return [_panels([matrix], self.direction) for matrix in self.matrices]


def highway_steps(
    buffers: Highway, direction: str, weights: Sequence[Tensor], gal: Tensor | None, share: Tensor | None
) -> Callable[[int, int], None]:
    """The function that runs all layers of some time steps, with their products.

    Args:
        buffers: those of the steps.
        direction: forward or backward.
        weights: the recurrent matrix of each layer, [H, 2 H].
        gal, share: as for ``lstm_sequence``, of the state and layer 0's matrix.

    Returns:
        A function of the first step and of the one after the last.
    """
    call = _bind(f"highway_sequence_{direction}", _Highway, buffers, _highway_sizes(buffers))
    return _of_steps(call, direction, weights, gal, share)


def _of_steps(call: Callable[[int], None], direction: str, weights, gal, share) -> Callable[[int, int], None]:
    """The function of a first and a last step from one of a recurrence's address."""
    panels = _panels(weights, direction)
    addresses = (None if part is None else _address("", part) for part in (gal, share))
    recurrence = _Recurrence(panels.data_ptr(), *addresses)

    def run(start: int, stop: int) -> None:
        recurrence.start, recurrence.stop = start, stop
        call(ctypes.addressof(recurrence))

    run.holds = (panels, gal, share)
    return run


def _panels(weights: Sequence[Tensor], direction: str) -> Tensor:
    """Matrices [K, N], backward their transposes, as multiplications read them: [L, ceil(N / P), K, P]."""
    matrices = [weight if direction == "forward" else weight.t() for weight in weights]
    (K, N), P = matrices[0].shape, library().panel_columns()
    panels = matrices[0].new_empty(len(weights), -(-N // P), K, P)
    for matrix, to in zip(matrices, panels.unbind(0), strict=True):
        _lay_panels(matrix, to)
    return panels


def _lay_panels(matrix: Tensor, to: Tensor) -> None:
    arguments = _Matmul(K=matrix.shape[0], N=matrix.shape[1], threads=torch.get_num_threads())
    arguments.w, (arguments.ld_w, arguments.next_w) = matrix.data_ptr(), matrix.stride()
    call = library().lay_panels
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p), None
    call(ctypes.addressof(arguments), to.data_ptr())


def gated(buffers: Gated, direction: str) -> Callable[[int], None]:
    """The function that runs one step of ``buffers``.

    Args:
        direction: forward or backward.
    """
    name = "lstm" if buffers.weight_d is None else "hyper_lstm"
    return _bind(f"{name}_{direction}_{DTYPES[buffers.u.dtype]}", _Gated, buffers, _gated_sizes(buffers))


def _gated_sizes(buffers: Gated) -> dict[str, int]:
    T, B, H = buffers.c.shape
    keep = buffers.keep
    return dict(
        T=T,
        B=B,
        H=H,
        Z=0 if buffers.weight_d is None else buffers.weight_d.shape[1],
        ld_u=buffers.u.stride(1),
        ld_du=0 if buffers.du is None else buffers.du.stride(1),
        keep_t=0 if keep is None or keep.shape[0] == 1 else keep.stride(0),
        keep_b=0 if keep is None or keep.shape[1] == 1 else keep.stride(1),
        threads=_threads(buffers),
    )


def highway(buffers: Highway, direction: str) -> Callable[[int], None]:
    """The function that runs one layer of a time step, number ``t L + l``."""
    return _bind(f"highway_{direction}_{DTYPES[buffers.u.dtype]}", _Highway, buffers, _highway_sizes(buffers))


def _highway_sizes(buffers: Highway) -> dict[str, int]:
    L, T, B, H = buffers.s.shape
    return dict(
        T=T,
        B=B,
        H=H,
        L=L,
        D=0 if buffers.du is None else buffers.du.shape[1],
        Z=0 if buffers.dz is None else buffers.dz.shape[1],
        ld_y=L * H if buffers.trace else H,
        threads=_threads(buffers),
    )


def energy(buffers: Energy, direction: str) -> Callable[[int], None]:
    """The function that does all of ``buffers``; its argument means nothing."""
    (N, R, A), S = buffers.q.shape, buffers.k.shape[1]
    threads = torch.get_num_threads() if buffers.dv is None else len(buffers.dv)
    sizes = dict(B=N, R=R, S=S, A=A, H=R * S * A, threads=threads)
    return _bind(f"energy_{direction}_{DTYPES[buffers.q.dtype]}", _Energy, buffers, sizes)


@functools.cache
def multiplies() -> bool:
    """Whether ``product`` is there and fast, which it is with AVX2 or AVX-512."""
    return torch.backends.cpu.get_cpu_capability() in LEVELS and library() is not None


def product(x: Tensor, w: Tensor, add: Tensor | None, y: Tensor) -> None:
    """Writes ``x @ w + add`` to y, all float32; ``few_rows.chosen`` has looked at them, and a step has many.

    Args:
        x: [..., K], contiguous, 1 to 8 rows. w: [K, N], stored by rows or by columns.
        add: [N], or [M, N] for the M rows of x, contiguous; None for nothing. y: [..., N], contiguous.
    """
    (K, N), by_rows = w.shape, w.stride(1) == 1
    M = x.numel() // K
    arguments = _Product(
        M,
        K,
        N,
        w.stride(0) if by_rows else w.stride(1),
        0 if add is None or add.dim() == 1 else N,
        torch.get_num_threads(),
        x.data_ptr(),
        w.data_ptr(),
        None if add is None else add.data_ptr(),
        y.data_ptr(),
    )
    name = "product" if by_rows else "product_transposed"
    getattr(library(), name)(ctypes.byref(arguments))


class Panels:
    """A float32 matrix [K, N], or a stack [L, K, N], for many products; it may be a transpose.

    It is laid out for them where that is of use, and must not change.
    """

    def __init__(self, w: Tensor):
        stays = library().stays
        stays.argtypes, stays.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_int
        self.w = w
        self.panels = None
        if not stays(*w.stride()[-2:]):
            self.panels = _panels([w] if w.dim() == 2 else w.unbind(0), "forward")

    def product(self, x: Tensor, out: Tensor, add: Tensor | None = None) -> None:
        """Writes ``add + x @ w`` to ``out``; as ``matmul``."""
        if self.panels is None:
            matmul(x, self.w, out, add)
        else:
            _multiply(x, self.w.shape, out, add, panels=self.panels.data_ptr())


def matmul(x: Tensor, w: Tensor, out: Tensor, add: Tensor | None = None) -> None:
    """Writes ``add + x @ w`` to ``out``, all float32 on the CPU; a row may lie apart from the next.

    Args:
        x: [M, K]. w: [K, N]. Either may be a transpose. Or stacks of L of them.
        out: [M, N], nowhere where x or w are; of stacks [L, M, N].
        add: [N] or as ``out``, which it may be; None for nothing.
    """
    ld_w, next_w = w.stride()[-2:]
    stack_w = w.stride(0) if w.dim() == 3 else 0
    _multiply(x, w.shape, out, add, w=w.data_ptr(), ld_w=ld_w, next_w=next_w, stack_w=stack_w)


def _multiply(x: Tensor, shape: Sequence[int], out: Tensor, add: Tensor | None, **matrix: int) -> None:
    *stack, M, K = x.shape
    N, rows = shape[-1], [part for part in (out, add) if part is not None]
    fits = (*stack, K, N) == tuple(shape) and out.shape == (*stack, M, N)
    if add is not None:
        fits = fits and add.shape in (out.shape, (N,))
    if not fits or any(part.dtype != torch.float32 or part.stride(-1) != 1 for part in rows):
        raise ValueError(f"{tuple(x.shape)} by {tuple(shape)} cannot be written to {tuple(out.shape)}")
    threads = torch.get_num_threads() if math.prod(stack) * M * K * N >= SHARED else 1
    ld_x, next_x = x.stride()[-2:]
    arguments = _Matmul(1, M, K, N, ld_x=ld_x, next_x=next_x, ld_y=out.stride(-2), threads=threads, **matrix)
    arguments.x, arguments.y = x.data_ptr(), out.data_ptr()
    if add is not None:
        arguments.add, arguments.ld_add = add.data_ptr(), add.stride(-2) if add.dim() > 1 else 0
    if stack:
        arguments.stack, arguments.stack_x, arguments.stack_y = stack[0], x.stride(0), out.stride(0)
        arguments.stack_add = add.stride(0) if add is not None and add.dim() == 3 else 0
    call = library().matmul
    call.argtypes, call.restype = (ctypes.c_void_p,), None
    call(ctypes.addressof(arguments))


SHARED = 1 << 19
"""Multiplications of a product from which threads share it."""


def lstm_gates(a: Tensor, c: Tensor, forget_bias: float) -> tuple[Tensor, Tensor]:
    """The new h and c [B, H] of an LSTM from the sums of its gates i, f, g, o, [B, 4 H], all float32."""
    c = c.contiguous()
    h, after = torch.empty_like(c), torch.empty_like(c)
    call = library().lstm_gates
    call.argtypes, call.restype = [ctypes.c_int64] * 2 + [ctypes.c_float] + [ctypes.c_void_p] * 4, None
    call(*c.shape, forget_bias, a.data_ptr(), c.data_ptr(), after.data_ptr(), h.data_ptr())
    return h, after


def _threads(buffers: Gated | Highway) -> int:
    """How many threads may share the rows: no more than there are slots for their sums."""
    return torch.get_num_threads() if buffers.sums is None else len(buffers.sums)


def _bind(function: str, structure: type, buffers, sizes: dict) -> Callable[[int], None]:
    """A call of ``function`` with the addresses of ``buffers``, which it keeps alive."""
    arguments = _arguments(structure, buffers, sizes)
    call = getattr(library(), function)
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_int64), None
    bound = functools.partial(call, ctypes.addressof(arguments))
    # An address keeps nothing alive; what it points into has to live as long as the call.
    bound.holds = (arguments, buffers)
    return bound


def _arguments(structure: type, buffers, sizes: dict):
    """A C++ structure of ``sizes`` and of the numbers and addresses of ``buffers``."""
    values = vars(buffers)
    arguments = structure(**sizes)
    for name, kind in structure._fields_:
        if name in sizes:
            continue
        value = values[name]
        if kind is ctypes.c_void_p:
            value = None if value is None else _address(name, value)
        setattr(arguments, name, value)
    return arguments


def _address(name: str, tensor: Tensor) -> int:
    """Where a tensor's elements lie; an LSTM's rows of u and du may lie apart, all else is contiguous."""
    if name in ("u", "du") and tensor.dim() == 3:
        T, B, ld = tensor.shape[0], tensor.shape[1], tensor.stride(1)
        regular = tensor.stride(2) == 1 and (T == 1 or tensor.stride(0) == B * ld)
    else:
        regular = tensor.is_contiguous()
    if not regular or tensor.device.type != "cpu":
        raise ValueError(f"{name} of strides {tensor.stride()} on {tensor.device} cannot be given to C++")
    return tensor.data_ptr()
