"""The implementations of a step's point-wise part by name, and which of them can run what."""

from collections.abc import Callable, Sequence

import torch

from rhhn_fairseq.kernels import aten, native, triton
from rhhn_fairseq.kernels.buffers import Gated, Highway
from rhhn_fairseq.kernels.matmul import way
from rhhn_fairseq.kernels.precision import matmul_precision

IMPLEMENTATIONS = {"native": native, "aten": aten}
"""Those for the CPU and, of them, aten for any device."""

ACCELERATED = {"triton": triton}
"""Those that need more than torch and this package."""


def available(device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the implementations for operands of a type on a device, the preferred first."""
    if dtype not in (*native.DTYPES, torch.float16):
        return ()
    names = ("aten",)
    if device.type == "cpu" and dtype in native.DTYPES and native.library() is not None:
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


NEAR = 1 << 18
"""Numbers of recurrent matrices that stay in a core's own cache, so that it may run sequences by itself."""

FAR = 15 << 18
"""The same for the cache that cores share, where products are the same compiled code one by one."""

ROWS_NEAR_FAR = 4
"""Sequences a core has to have for matrices in that cache: they are read for so many at a time."""

FAR_FEW = 2 << 18
"""The same for fewer sequences, half of the threads or more; those of an LSTM or HyperLSTM."""

FAR_FEW_HIGHWAY = 8 << 18
"""Those of a highway, whose layers leave its threads little to do between two waits for each other."""

ROWS_HIGHWAY = 32
"""Sequences of a core from which layers of a highway may come from memory; an LSTM gains nothing by that."""

STEPS = 4
"""Steps from which laying the matrices out pays."""

FEW = 32
"""Sequences up to which it takes less time than products that torch rounds to bfloat16 (medium precision)."""


def _in_one_call(name: str, buffers: Gated | Highway, weights: Sequence[torch.Tensor]) -> bool:
    """Whether native steps run many at a time, each core its own sequences: where that is faster."""
    if name != "native" or not native.has_sequences(buffers):
        return False
    highway = isinstance(buffers, Highway)
    (T, B, _), threads = buffers.s.shape[1:] if highway else buffers.c.shape, torch.get_num_threads()
    if T < STEPS or (B > FEW and matmul_precision("cpu") == "medium"):
        return False
    size, rows = sum(weight.numel() for weight in weights), B // threads
    if size <= NEAR or way(name, buffers.u) != "native":
        return size <= NEAR
    if rows < ROWS_NEAR_FAR:
        return 2 * B >= threads and size <= (FAR_FEW_HIGHWAY if highway else FAR_FEW)
    return size <= FAR or (highway and rows >= ROWS_HIGHWAY)


def lstm_sequence(
    name: str,
    buffers: Gated,
    direction: str,
    weight: torch.Tensor,
    gal: torch.Tensor | None,
    share: torch.Tensor | None,
) -> bool:
    """Whether implementation ``name`` ran all steps of an LSTM in one call; see ``native.lstm_sequence``."""
    if name == "triton":
        return triton.whole_lstm(buffers, direction, weight, gal, share)
    if not _in_one_call(name, buffers, [weight]):
        return False
    native.lstm_sequence(buffers, direction, weight, gal, share)
    return True


def hyper_lstm_sequence(
    name: str,
    main: Gated,
    hyper: Gated,
    direction: str,
    g_hyper: torch.Tensor | None,
    weights: native.Laid,
    *others,
) -> bool:
    """The same for a HyperLSTM, with the arguments of ``native.hyper_lstm_sequence``."""
    if not _in_one_call(name, main, weights.matrices):
        return False
    native.hyper_lstm_sequence(main, hyper, direction, g_hyper, weights, *others)
    return True


def highway_steps(
    name: str,
    buffers: Highway,
    direction: str,
    weights: Sequence[torch.Tensor],
    gal: torch.Tensor | None,
    share: torch.Tensor | None,
) -> Callable[[int, int], None] | None:
    """The function that runs some time steps of a highway in one call, where there is one and it is faster.

    See ``native.highway_steps``.
    """
    if name == "triton":
        return triton.highway_steps(buffers, direction, weights, gal, share)
    if not _in_one_call(name, buffers, weights):
        return None
    return native.highway_steps(buffers, direction, weights, gal, share)


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
