"""Triton kernels for the point-wise work of a time step on CUDA devices, as ``native`` does it on the CPU.

LSTM and highway networks take one kernel per step. Each program works on complete rows of the batch, so layer
normalisation needs no communication between programs. The scaling vectors d of a HyperLSTM and their
gradients are computed by torch.bmm outside of the kernel, in the type of the operands: weight_d is then read
once a step instead of once a row, and its gradient needs no sum over programs. Each program adds gradients
that are sums over rows to a slot of its own, in the order of the steps, so results repeat.

The package triton is imported by the first sequence that runs here. With TRITON_INTERPRET=1 in the
environment before Python starts, Triton's interpreter runs the kernels on the CPU.
"""

import functools
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import Buffers, Gated, Gradients

OLDEST = (3, 4)
"""The first version that compiles the kernels. Earlier versions do not support all uses of tuples."""

OLDEST_GPU = (8, 0)
"""The compute capability from which the kernels are known to compile."""

ELEMENTS = 1024
"""Elements of a program, if the batch has that many: enough to keep the loads of four warps in flight."""


def obstacle(device: torch.device) -> str | None:
    """Returns why the kernels cannot run on a device; None if they can."""
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return "triton runs on CUDA devices (and with TRITON_INTERPRET=1, slowly, on the CPU)"
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < OLDEST_GPU:
            return f"triton needs a GPU of compute capability 8.0 or newer, found {major}.{minor}"
        if not _has_compiler():
            return "triton needs a C compiler, which starts its kernels: gcc, clang, or one that CC names"
    return missing()


def missing() -> str | None:
    """Returns what must be installed first; None if nothing is missing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install triton"
    version = _version()
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
        return f"triton must be {'.'.join(map(str, OLDEST))} or newer, found {version}"
    return None


@functools.cache
def _has_compiler() -> bool:
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        # Some builds have another name.
        import triton

        return triton.__version__


@dataclass(frozen=True)
class Tile:
    """ROWS rows of COLS elements for each of ``blocks`` programs of ``warps`` warps."""

    rows: int
    cols: int
    warps: int
    blocks: int

    @staticmethod
    def of(B: int, H: int) -> "Tile":
        """The tiles of [B, H]: complete rows, because of normalisation, rounded up to a power of two."""
        cols = _power_of_two(H)
        rows = min(max(1, ELEMENTS // cols), _power_of_two(B))
        # Four elements a thread: the backward pass keeps about twenty numbers for each in registers.
        warps = min(max(1, rows * cols // 128), 16)
        return Tile(rows, cols, warps, -(-B // rows))

    @property
    def arguments(self) -> dict[str, int]:
        """The arguments of a kernel."""
        return {"ROWS": self.rows, "COLS": self.cols, "num_warps": self.warps}


def _power_of_two(n: int) -> int:
    """Returns the smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def slots(shape: Sequence[int], like: Tensor) -> int:
    """Returns the number of slots for the gradient of a parameter.

    Args:
        shape: the parameter's. Programs sum gradients of vectors, a matrix product those of matrices.
        like: a state, [B, H].
    """
    return Tile.of(*like.shape).blocks if len(shape) == 1 else 1


def step(buffers: Buffers, gradients: Gradients | None) -> Callable[[int], None]:
    """Returns a function that runs one step of ``buffers``, or of a highway one layer; backward with
    gradients."""
    from rhhn_fairseq.ops.triton.steps import GatedStep, HighwayStep

    kind: Any = GatedStep if isinstance(buffers, Gated) else HighwayStep
    steps = kind(buffers, gradients)
    return steps.forward if gradients is None else steps.backward
