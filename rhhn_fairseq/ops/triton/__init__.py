"""Triton kernels for the point-wise work of a time step on CUDA devices, as ``native`` does it on the CPU.

LSTM and highway networks take one kernel per step. Each program works on complete rows of the batch, so layer
normalisation needs no communication between programs. The scaling vectors d of a HyperLSTM and their
gradients are computed by torch.bmm outside of the kernel: weight_d is then read once a step instead of once a
row, and its gradient needs no sum over programs. Each program adds gradients that are sums over rows to a
slot of its own, in the order of the steps, so results repeat.

Networks of up to 128 units have kernels that include the matrix products: an LSTM or a highway network runs
all its steps in one kernel, and the hypernetwork of a HyperLSTM runs each step in one.

The package triton is imported by the first sequence that runs here. With TRITON_INTERPRET=1 in the
environment before Python starts, Triton's interpreter runs the kernels on the CPU.
"""

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import Gated, Highway
from rhhn_fairseq.ops.triton.tiles import Tile

OLDEST = (3, 4)
"""The first version that compiles the kernels. Earlier versions do not support all uses of tuples."""


def obstacle(device: torch.device) -> str | None:
    """Returns why the kernels cannot run on a device; None if they can."""
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return "triton runs on CUDA devices (and with TRITON_INTERPRET=1, slowly, on the CPU)"
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


def gated(buffers: Gated, direction: str) -> Callable[[int], None]:
    """Returns a function that runs one step of ``buffers``, forward or backward."""
    from rhhn_fairseq.ops.triton.steps import GatedStep

    return getattr(GatedStep(buffers, direction), direction)


def highway(buffers: Highway, direction: str) -> Callable[[int], None]:
    """Returns a function that runs one layer of a time step, number ``t L + l``."""
    from rhhn_fairseq.ops.triton.steps import HighwayStep

    return getattr(HighwayStep(buffers, direction), direction)


def run_lstm(
    buffers: Gated, direction: str, weight: Tensor, gal: Tensor | None, share: Tensor | None
) -> bool:
    """Runs all steps of a small LSTM in one kernel; False if the LSTM is too large.

    Args: as for ``native.lstm_sequence``.
    """
    from rhhn_fairseq.ops.triton import sequences

    return sequences.lstm(buffers, direction, weight, gal, share)


def highway_steps(
    buffers: Highway, direction: str, weights: Sequence[Tensor], gal: Tensor | None, share: Tensor | None
) -> Callable[[int, int], None] | None:
    """Returns a function that runs time steps of a small highway without z in one kernel; else None.

    Args and returns: as for ``native.highway_steps``.
    """
    from rhhn_fairseq.ops.triton import sequences

    return sequences.highway(buffers, direction, weights, gal, share)


def hypernetwork_forward(
    hyper: Gated,
    main: Gated,
    weights: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor],
    previous: bool,
) -> Callable[[int], None] | None:
    """Returns a function that runs one step of a small hypernetwork with its products; None for a large one.

    A step adds up the gates' sums, runs the LSTM and computes z.

    Args:
        hyper, main: the buffers of both networks.
        weights: weight_e, weight_z and bias_z, see ``hyper_lstm_passes.Weights``.
        inputs: the projected input [T, B, 4 N], and the products of the main network's h [T, B, 4 N], whose
            rows may have gaps between them.
        previous: whether z comes from the hypernetwork's state of the previous step.
    """
    from rhhn_fairseq.ops.triton import products, steps

    if not products.multiplies(hyper.c0.shape[1], hyper.u.dtype):
        return None
    step = steps.HyperStep(hyper, main, "forward", weights[:2], previous)
    step.prepare_forward(weights[2], *inputs)
    return step.forward


def hypernetwork_backward(
    hyper: Gated, main: Gated, weights: tuple[Tensor, Tensor], previous: bool
) -> Callable[[int], None] | None:
    """Returns a function that runs one backward step of a small hypernetwork; None for a large one.

    A step goes from the gradient of z to that of the previous state, without the gradient through the main h.

    Args:
        hyper, main, previous: as for ``hypernetwork_forward``. weights: weight_e and weight_z.
    """
    from rhhn_fairseq.ops.triton import products, steps

    if not products.multiplies(hyper.c0.shape[1], hyper.u.dtype):
        return None
    step = steps.HyperStep(hyper, main, "backward", weights, previous)
    step.prepare_backward()
    return step.backward
