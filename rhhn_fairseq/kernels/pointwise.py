"""The implementations of a step's point-wise part by name, and which of them can run what."""

from collections.abc import Callable, Sequence

import torch

from rhhn_fairseq.kernels import aten, native, triton
from rhhn_fairseq.kernels.buffers import Gated, Highway

IMPLEMENTATIONS = {"native": native, "aten": aten}
"""Those for the CPU and, of them, aten for any device."""

ACCELERATED = {"triton": triton}
"""Those that need more than torch and this package."""


def available(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the implementations for operands of a type on a device, the preferred first."""
    if dtype not in native.DTYPES:
        return ()
    names = ("aten",)
    if device.type == "cpu" and native.library() is not None:
        names = ("native", *names)
    # Last, because no GPU has run it yet: it is there for those who ask for it.
    return names if triton.obstacle(device) else (*names, "triton")


def obstacle(name: str, device: torch.device) -> str | None:
    """Why an implementation cannot run on a device, where there is more to say than that."""
    return triton.obstacle(device) if name == "triton" else None


def gated(name: str, buffers: Gated, direction: str) -> Callable[[int], None]:
    """The function of implementation ``name`` that runs one step of ``buffers``, forward or backward."""
    return _implementation(name).gated(buffers, direction)


def highway(name: str, buffers: Highway, direction: str) -> Callable[[int], None]:
    """The function of implementation ``name`` that runs one layer of a time step, number ``t L + l``."""
    return _implementation(name).highway(buffers, direction)


def whole(
    name: str,
    buffers: Gated | Highway,
    direction: str,
    weights: Sequence[torch.Tensor],
    gal: torch.Tensor | None,
    share: torch.Tensor | None,
) -> bool:
    """Whether implementation ``name`` ran all steps with their products in one call; see ``native.whole``."""
    implementation = {"native": native, "triton": triton}.get(name)
    return implementation is not None and implementation.whole(buffers, direction, weights, gal, share)


def whole_hyper(name: str, *arguments) -> bool:
    """The same for a HyperLSTM, with the arguments of ``native.whole_hyper``."""
    return name == "native" and native.whole_hyper(*arguments)


def hypernetwork(
    name: str,
    hyper: Gated,
    main: Gated,
    direction: str,
    weight_e: torch.Tensor,
    weight_z: torch.Tensor,
    bias_z: torch.Tensor | None,
    g_hyper: torch.Tensor | None,
    side: torch.Tensor | None,
    previous: bool,
) -> Callable[[int], None] | None:
    """The function that runs a step of a HyperLSTM's hypernetwork with its own products, where there is one.

    It adds up the gates' sums, runs the LSTM and makes z; backward it goes from the gradient of z to that of
    the state before the step, but for what comes through the main network's h.

    Args:
        hyper, main: the buffers of either network.
        weight_e ... g_hyper, previous: as for ``hyper_gated.hyper_lstm``.
        side: what the main network's h adds to the gates' sums, [T, B, 4 N]; rows may lie apart.
            Backward it is None, as are bias_z and g_hyper.
    """
    if name != "triton":
        return None
    return triton.hypernetwork(hyper, main, direction, weight_e, weight_z, bias_z, g_hyper, side, previous)


def sums_of(name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros [slots, *shape] for a parameter's gradient, a slot for each thread or program that adds to it.

    Args:
        shape: the parameter's.
        like: a state, [B, H].
    """
    slots = {"native": torch.get_num_threads(), "aten": 1}.get(name) or triton.slots(shape, like)
    return like.new_zeros(slots, *shape)


def _implementation(name: str):
    return (IMPLEMENTATIONS | ACCELERATED)[name]
