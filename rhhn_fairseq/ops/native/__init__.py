"""Compiled C++ for the CPU: the point-wise work of a time step, whole sequences, and matrix products.

The library is built with the package, three times for x86 (for AVX-512, for AVX2 and for any processor). The
best build that this processor can run is loaded. It does not depend on torch: an operation passes it the
addresses of its buffers once, and then the number of each step.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import Buffers, Gated, GatedGradients, Gradients, Highway
from rhhn_fairseq.ops.native.build import (
    DTYPES,
    IS_BUILT,
    EnergyStruct,
    GatedStruct,
    HighwayStruct,
    HyperRecurrenceStruct,
    IntegersStruct,
    MatmulStruct,
    ProductStruct,
    RecurrenceStruct,
    compiled,
    library,
    multiplies,
    runs_sequences,
)

__all__ = ["DTYPES", "IS_BUILT", "library", "multiplies", "runs_sequences"]

SHARED = 1 << 19
"""Multiplications from which threads share a product."""

FEW_ROWS = range(2, 9)
"""Numbers of rows with a dedicated function, which reads the matrix once and packs nothing."""


def many_steps(
    buffers: Buffers,
    gradients: Gradients | None,
    weights: Sequence[Tensor],
) -> Callable[[int, int], None]:
    """Returns a function that runs some steps, with their products: of an LSTM without a hypernetwork, or all
    layers of a highway.

    Args:
        buffers: of the steps. An LSTM's ``gx`` is what the products are added to.
        gradients: for the backward pass; None runs forward.
        weights: the recurrent matrix of each layer, [H, 4 H] or [H, 2 H].

    Returns:
        A function of the first step and of the step after the last.
    """
    kind, direction = "lstm" if isinstance(buffers, Gated) else "highway", direction_of(gradients)
    call = _bind(f"{kind}_sequence_{direction}", buffers, gradients)
    panels = pack(weights, direction)
    recurrence = RecurrenceStruct(panels.data_ptr())
    for name in ("gal", "share"):
        if (tensor := getattr(buffers, name)) is not None:
            setattr(recurrence, name, _address(name, tensor))

    def run(start: int, stop: int) -> None:
        recurrence.start, recurrence.stop = start, stop
        call(ctypes.addressof(recurrence))

    # An address keeps nothing alive; what it points to must live as long as the function.
    run.holds, run.clears = panels, True  # type: ignore[attr-defined]  # Functions have no declared attributes.
    return run


def hyper_lstm_sequence(
    main: tuple[Gated, GatedGradients | None],
    hyper: tuple[Gated, GatedGradients | None],
    panels: Sequence[Tensor],
    vectors: Sequence[Tensor],
    previous: bool,
) -> Callable[[int, int], None]:
    """Does the same as ``many_steps`` for a HyperLSTM; see ``hyper_lstm.hyper_lstm`` for the names.

    Args:
        main, hyper: the buffers of each network, and its gradients for the backward pass or None. The main
            network's rows of u and du continue with the hypernetwork's products of h and their gradients.
        panels: both matrices of h side by side, [H, 4 (H + N)], weight_e and weight_z, each packed by
            ``pack`` for this direction.
        vectors: bias_z [12 Z] and g_hyper [T, B, 4 N], with which the hypernetwork's sums begin; empty for
            the backward pass.
    """
    recurrence = HyperRecurrenceStruct(previous)
    for name, tensor in zip(("weight", "weight_e", "weight_z"), panels, strict=True):
        setattr(recurrence, name, tensor.data_ptr())
    named = dict(zip(("bias_z", "g_hyper"), vectors, strict=False))
    for name, vector in (named | {"gal": main[0].gal, "share": main[0].share}).items():
        setattr(recurrence, name, None if vector is None else _address(name, vector))
    first, second = _arguments(*main), _arguments(*hyper)
    direction = "forward" if main[1] is None else "backward"
    call = getattr(compiled(), f"hyper_lstm_sequence_{direction}")

    def run(start: int, stop: int) -> None:
        recurrence.start, recurrence.stop = start, stop
        call(ctypes.addressof(first), ctypes.addressof(second), ctypes.addressof(recurrence))

    run.holds, run.clears = (main, hyper, panels, vectors), True  # type: ignore[attr-defined]
    return run


def pack(weights: Sequence[Tensor], direction: str) -> Tensor:
    """Packs matrices [K, N], for backward their transposes, into panels [L, ceil(N / P), K, P]."""
    (K, N), P = weights[0].shape, compiled().panel_columns()
    if direction == "backward":
        K, N = N, K
    panels = weights[0].new_empty(len(weights), -(-N // P), K, P)
    for layer, weight in enumerate(weights):
        if weight.dtype != torch.float32:
            raise ValueError(f"only float32 matrices are packed, not {weight.dtype}")
        matrix = weight if direction == "forward" else weight.t()
        arguments = MatmulStruct(K=K, N=N, threads=torch.get_num_threads())
        arguments.w, (arguments.ld_w, arguments.next_w) = matrix.data_ptr(), matrix.stride()
        compiled().lay_panels(ctypes.addressof(arguments), panels[layer].data_ptr())
    return panels


def pack_if_faster(w: Tensor) -> Tensor | None:
    """Packs a float32 matrix [K, N] for many products; None if that does not help."""
    return None if compiled().stays(*w.stride()) else pack([w], "forward")


def step(buffers: Buffers, gradients: Gradients | None) -> Callable[[int], None]:
    """Returns a function that runs one step of ``buffers``, or of a highway one layer; backward with
    gradients."""
    name = "highway"
    if isinstance(buffers, Gated):
        name = "lstm" if buffers.weight_d is None else "hyper_lstm"
    return _bind(f"{name}_{direction_of(gradients)}_{DTYPES[buffers.u.dtype]}", buffers, gradients)


def _gated_sizes(buffers: Gated, gradients: Gradients | None) -> dict[str, int]:
    T, B, H = buffers.c.shape
    keep = buffers.keep
    return dict(
        T=T,
        B=B,
        H=H,
        Z=0 if buffers.weight_d is None else buffers.weight_d.shape[1],
        # Of a single row, the other stride may be any number.
        ld_u=buffers.u.stride(1 if B > 1 else 0),
        D=0 if gradients is None else len(gradients.du),
        ld_du=0 if gradients is None else gradients.du.stride(1 if B > 1 else 0),
        keep_t=0 if keep is None or keep.shape[0] == 1 else keep.stride(0),
        threads=torch.get_num_threads() if gradients is None else len(gradients.sums),
    )


def _highway_sizes(buffers: Highway, gradients: Gradients | None) -> dict[str, int]:
    L, T, B, H = buffers.s.shape
    return dict(
        T=T,
        B=B,
        H=H,
        L=L,
        D=0 if gradients is None else gradients.du.shape[1],
        ld_y=L * H if buffers.trace else H,
        threads=torch.get_num_threads() if gradients is None else len(gradients.sums),
    )


def energy(tensors: dict[str, Tensor]) -> None:
    """Computes the energies of additive attention, or the gradients of its operands.

    Args:
        tensors: by name q [N, R, A], k [N, S, A], v [A] in the state type and mask [N, S], true at real
            positions; with them e [N, R, S] in the state type, which is written, or for the backward pass
            its gradient de, and dq, dk and dv [threads, A], initially zero.
    """
    (N, R, A), S, dv = tensors["q"].shape, tensors["k"].shape[1], tensors.get("dv")
    direction, threads = ("forward", torch.get_num_threads()) if dv is None else ("backward", len(dv))
    arguments = EnergyStruct(N, R, S, A, R * S * A, threads)
    for name, tensor in tensors.items():
        setattr(arguments, name, _address(name, tensor))
    call = getattr(compiled(), f"energy_{direction}_{DTYPES[tensors['q'].dtype]}")
    call(ctypes.addressof(arguments), 0)


def matmul(
    x: Tensor, w: Tensor, out: Tensor, add: Tensor | None = None, panels: Tensor | None = None
) -> None:
    """Writes ``add + x @ w`` to ``out``, all float32 on the CPU; rows may have gaps between them.

    Args:
        x: [M, K]. w: [K, N]. Either may be a transpose.
        out: [M, N]; must not overlap x or w.
        add: [N] or [M, N]; may be ``out`` itself; None to add nothing.
        panels: what ``pack`` made of w; it is read instead of w.

    Raises:
        ValueError: shapes, types or strides do not fit.
    """
    (M, K), N = x.shape, w.shape[-1]
    fits = w.shape == (K, N) and out.shape == (M, N) and (add is None or add.shape in ((M, N), (N,)))
    for rows in (out,) if add is None else (out, add):
        # Of a single column, the stride may be any number.
        fits = fits and rows.dtype == torch.float32 and 1 in (rows.stride(-1), rows.shape[-1])
    if not fits or x.dtype != torch.float32 or w.dtype != torch.float32:
        raise ValueError(
            f"{x.dtype} {tuple(x.shape)} by {w.dtype} {tuple(w.shape)} cannot be written to "
            f"{out.dtype} {tuple(out.shape)}"
        )
    threads = torch.get_num_threads() if M * K * N >= SHARED else 1
    arguments = MatmulStruct(M, K, N, *x.stride(), ld_y=out.stride(0), threads=threads)
    arguments.x, arguments.y = x.data_ptr(), out.data_ptr()
    if panels is None:
        arguments.w, (arguments.ld_w, arguments.next_w) = w.data_ptr(), w.stride()
    else:
        arguments.panels = panels.data_ptr()
    if add is not None:
        arguments.add, arguments.ld_add = add.data_ptr(), add.stride(0) if add.dim() > 1 else 0
    compiled().matmul(ctypes.addressof(arguments))


def multiply_few_rows(x: Tensor, w: Tensor, out: Tensor, add: Tensor | None = None) -> None:
    """Does the same as ``matmul`` for the numbers of rows in ``FEW_ROWS``, as in a step of a beam search.

    Such a product takes as long as reading the matrix once. Nothing is packed.

    Args:
        x: [M, K], contiguous. w: [K, N], stored by rows or by columns. out: [M, N], contiguous.
        add: [N] or [M, N], contiguous; None to add nothing.
    """
    (M, K), N, by_rows = x.shape, w.shape[1], w.stride(1) == 1
    arguments = ProductStruct(
        M, K, N, w.stride(0) if by_rows else w.stride(1), threads=torch.get_num_threads()
    )
    arguments.x, arguments.w, arguments.y = x.data_ptr(), w.data_ptr(), out.data_ptr()
    if add is not None:
        arguments.add, arguments.ld_add = add.data_ptr(), 0 if add.dim() == 1 else N
    call = compiled().product if by_rows else compiled().product_transposed
    call(ctypes.addressof(arguments))


INTEGERS = (16, 4)
"""Columns of a panel of 8-bit integers, and rows that an instruction multiplies; see integers.cpp."""


def lay_integers(integers_NK: Tensor) -> Tensor:
    """Returns 8-bit integers of at most 63 in the panels of ``multiply_integers``, padded with zeros."""
    (N, K), (columns, depth) = integers_NK.shape, INTEGERS
    padded = torch.nn.functional.pad(integers_NK, (0, -K % depth, 0, -N % columns))
    return padded.unflatten(1, (-1, depth)).unflatten(0, (-1, columns)).transpose(1, 2).contiguous()


def collect_integers(panels: Tensor, N: int, K: int) -> Tensor:
    """Returns the integers [N, K] that ``lay_integers`` laid in panels."""
    return panels.transpose(1, 2).flatten(2).flatten(0, 1)[:N, :K]


def multiply_integers(x_MK: Tensor, panels: Tensor, scales_N: Tensor, sums_N: Tensor) -> Tensor:
    """Returns float rows times a matrix of integers, [M, N]; see ``quantised.QuantisedWeight``.

    Args:
        x_MK: float32, contiguous; each row is rounded to 8 bits by its own range.
        panels: what ``lay_integers`` returned. scales_N: float32, of the columns. sums_N: int32, of each
            column's integers.
    """
    (M, K), N = x_MK.shape, len(scales_N)
    y = x_MK.new_empty(M, N)
    arguments = IntegersStruct(M, K, N, torch.get_num_threads() if M * K * N >= SHARED else 1)
    operands = {"x": x_MK, "panels": panels, "scales": scales_N, "sums": sums_N, "y": y}
    for name, tensor in operands.items():
        setattr(arguments, name, _address(name, tensor))
    compiled().multiply_integers(ctypes.addressof(arguments))
    return y


def lstm_gates(a: Tensor, c: Tensor, forget_bias: float) -> tuple[Tensor, Tensor]:
    """Returns the new h and c [B, H] of an LSTM from the sums of its gates i, f, g, o, [B, 4 H]; float32."""
    c = c.contiguous()
    h, after = torch.empty_like(c), torch.empty_like(c)
    before = _address("c", c)
    compiled().lstm_gates(*c.shape, forget_bias, a.data_ptr(), before, after.data_ptr(), h.data_ptr())
    return h, after


def direction_of(gradients: Gradients | None) -> str:
    """Returns the direction of a pass in the names of functions."""
    return "forward" if gradients is None else "backward"


def _bind(function: str, buffers: Buffers, gradients: Gradients | None) -> Callable[[int], None]:
    """Binds ``function`` to the addresses of buffers and gradients and keeps these alive."""
    arguments = _arguments(buffers, gradients)
    bound = functools.partial(getattr(compiled(), function), ctypes.addressof(arguments))
    # An address keeps nothing alive; what it points to must live as long as the call.
    bound.holds = (arguments, buffers, gradients)  # type: ignore[attr-defined]  # Nor has a partial.
    return bound


def _arguments(buffers: Buffers, gradients: Gradients | None) -> ctypes.Structure:
    """Returns the C++ structure of buffers and gradients; what is missing stays a null pointer."""
    structure: Any
    if isinstance(buffers, Gated):
        structure, sizes = GatedStruct, _gated_sizes(buffers, gradients)
    else:
        structure, sizes = HighwayStruct, _highway_sizes(buffers, gradients)
    values = vars(buffers) if gradients is None else vars(buffers) | vars(gradients)
    arguments = structure(**sizes)
    for name, kind in structure._fields_:
        value = values.get(name)
        if name in sizes or value is None:
            continue
        if kind is ctypes.c_void_p:
            # Contiguous tensors, nearly all of them, do not need the call of ``_address``.
            plain = value.is_contiguous() and value.is_cpu
            value = value.data_ptr() if plain else _address(name, value)
        setattr(arguments, name, value)
    return arguments


def _address(name: str, tensor: Tensor) -> int:
    """Returns the address of a tensor's elements. Only rows of u and du may have gaps between them.

    Raises:
        ValueError: the tensor has other strides, or is not in host memory.
    """
    if name in ("u", "du") and tensor.dim() == 3:
        T, B = tensor.shape[:2]
        ld = tensor.stride(1 if B > 1 else 0)
        regular = tensor.stride(2) == 1 and (T == 1 or tensor.stride(0) == B * ld)
    else:
        regular = tensor.is_contiguous()
    if not regular or tensor.device.type != "cpu":
        raise ValueError(f"{name} of strides {tensor.stride()} on {tensor.device} cannot be given to C++")
    return tensor.data_ptr()
