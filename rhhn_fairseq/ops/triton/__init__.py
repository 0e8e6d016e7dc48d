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

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import Gated, GatedGradients, Highway, HighwayGradients
from rhhn_fairseq.ops.triton.tiles import Tile

OLDEST = (3, 4)
"""The first version that compiles the kernels. Earlier versions do not support all uses of tuples."""

OLDEST_GPU = (8, 0)
"""The compute capability from which the kernels are known to compile."""


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


def slots(shape: Sequence[int], like: Tensor) -> int:
    """Returns the number of slots for the gradient of a parameter.

    Args:
        shape: the parameter's. Programs sum gradients of vectors, a matrix product those of matrices.
        like: a state, [B, H].
    """
    return Tile.of(*like.shape).blocks if len(shape) == 1 else 1


def gated(buffers: Gated, gradients: GatedGradients | None) -> Callable[[int], None]:
    """Returns a function that runs one step of ``buffers``, backward with gradients."""
    from rhhn_fairseq.ops.triton.steps import GatedStep

    step = GatedStep(buffers, gradients)
    return step.forward if gradients is None else step.backward


def highway(buffers: Highway, gradients: HighwayGradients | None) -> Callable[[int], None]:
    """Returns a function that runs one layer of a time step, number ``t L + l``."""
    from rhhn_fairseq.ops.triton.steps import HighwayStep

    step = HighwayStep(buffers, gradients)
    return step.forward if gradients is None else step.backward
