"""The implementations of a step's point-wise part by name, and which of them can run what."""

from collections.abc import Callable, Sequence

import torch

from rhhn_fairseq.kernels import aten, native
from rhhn_fairseq.kernels.buffers import Gated, Highway

IMPLEMENTATIONS = {"native": native, "aten": aten}


def available(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the implementations for operands of a type on a device, the preferred first."""
    if dtype not in native.DTYPES:
        return ()
    if device.type == "cpu" and native.library() is not None:
        return ("native", "aten")
    return ("aten",)


def gated(name: str, buffers: Gated, direction: str) -> Callable[[int], None]:
    """The function of implementation ``name`` that runs one step of ``buffers``, forward or backward."""
    return IMPLEMENTATIONS[name].gated(buffers, direction)


def highway(name: str, buffers: Highway, direction: str) -> Callable[[int], None]:
    """The function of implementation ``name`` that runs one layer of a time step, number ``t L + l``."""
    return IMPLEMENTATIONS[name].highway(buffers, direction)


def sums_of(name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros [slots, *shape] in which an implementation adds up gradients, a slot for each of its threads."""
    slots = torch.get_num_threads() if name == "native" else 1
    return like.new_zeros(slots, *shape)
