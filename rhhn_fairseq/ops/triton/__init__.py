"""Point-wise work of a time step as Triton kernels, for CUDA devices; the counterpart of the C++ code.

One kernel a step for LSTM and highway networks, each program with whole rows of the batch, so that layer
normalisation needs no other program. A HyperLSTM's scaling vectors d, and the gradients that belong to them,
are products of torch.bmm around the kernel: weight_d is then read once a step and not once a row, and its
gradient needs no sum over programs. Gradients that are sums over rows are added up in a slot for each
program, in the order of the steps, so that they come out the same in every run.

Up to 128 units kernels multiply by themselves as well: an LSTM or a highway network runs all its steps in one
kernel, and a HyperLSTM's hypernetwork each of its steps.

The package triton is imported by the first sequence that runs here. On the CPU its interpreter takes the
place of the compiler, if TRITON_INTERPRET=1 was in the environment before.
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
"""The first version that compiles the kernels. Earlier ones lack tuples, or some uses of them."""


def obstacle(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None where they can."""
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return "triton runs on CUDA devices (and with TRITON_INTERPRET=1, slowly, on the CPU)"
    return missing()


def missing() -> str | None:
    """What has to be installed first; None if nothing."""
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
    """How many slots the gradients of a parameter are added up in.

    Args:
        shape: the parameter's. Vectors are summed by the programs, matrices by a product of their own.
        like: a state, [B, H].
    """
    return Tile.of(*like.shape).blocks if len(shape) == 1 else 1


def gated(buffers: Gated, direction: str) -> Callable[[int], None]:
    """The function that runs one step of ``buffers``, forward or backward."""
    from rhhn_fairseq.ops.triton.steps import GatedStep

    return getattr(GatedStep(buffers, direction), direction)


def highway(buffers: Highway, direction: str) -> Callable[[int], None]:
    """The function that runs one layer of a time step, number ``t L + l``."""
    from rhhn_fairseq.ops.triton.steps import HighwayStep

    return getattr(HighwayStep(buffers, direction), direction)


def run_lstm(
    buffers: Gated, direction: str, weight: Tensor, gal: Tensor | None, share: Tensor | None
) -> bool:
    """Whether all steps of an LSTM ran in one kernel, as those of a small one do.

    Args: as for ``native.lstm_sequence``.
    """
    from rhhn_fairseq.ops.triton import sequences

    return sequences.lstm(buffers, direction, weight, gal, share)


def highway_steps(
    buffers: Highway, direction: str, weights: Sequence[Tensor], gal: Tensor | None, share: Tensor | None
) -> Callable[[int, int], None] | None:
    """The function that runs time steps of a highway in one kernel: where it is small and has no z.

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
    """The function that runs one step of a HyperLSTM's hypernetwork with its products, if it is small; else
    None.

    It adds up the gates' sums, runs the LSTM and makes z.

    Args:
        hyper, main: the buffers of either network.
        weights: weight_e, weight_z and bias_z, see ``hyper_lstm.Weights``.
        inputs: what the gates' sums begin with, [T, B, 4 N], and what the main network's h adds to them,
            which may have gaps between rows.
        previous: z comes from the hypernetwork's state of the step before.
    """
    from rhhn_fairseq.ops.triton import steps

    return steps.hypernetwork_forward(hyper, main, weights, inputs, previous)


def hypernetwork_backward(
    hyper: Gated, main: Gated, weights: tuple[Tensor, Tensor], previous: bool
) -> Callable[[int], None] | None:
    """The same backward: from the gradient of z to that of the state before, less what comes through the main
    h.

    Args:
        weights: weight_e and weight_z.
    """
    from rhhn_fairseq.ops.triton import steps

    return steps.hypernetwork_backward(hyper, main, weights, previous)
