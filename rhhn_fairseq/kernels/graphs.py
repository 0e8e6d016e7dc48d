"""Whole loops of a sequence program as CUDA graphs: thousands of small launches become one.

Off unless RHHN_CUDA_GRAPHS=1, because no GPU has run it yet. An operation's body is recorded the second time
it is called with the same shapes, types and numbers on the same stream, and replayed from then on. A
recording owns its inputs and outputs: arguments are copied in, results copied out, so that what autograd
keeps, or accumulates, is never written again, whatever calls lie between a forward and its backward. Layers
of the same shape share a recording. That costs one more pass over memory a call, and for each recording the
memory of a call; the least recently used one goes when there are more than ``LIMIT``.
"""

import contextlib
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.kernels.precision import matmul_precision

VARIABLE = "RHHN_CUDA_GRAPHS"
LIMIT = 16
"""Recordings kept: forward and backward for a few batch shapes."""


@dataclass
class Recording:
    """A call that can be repeated with other values: it reads ``inputs`` and writes ``outputs``."""

    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    settle: Callable[[], None]
    """Returns when no replay is under way any more, so that the memory may go."""

    def __call__(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for own, value in zip(self.inputs, values, strict=True):
            own.copy_(value)
        self.replay()
        return tuple(output.clone() for output in self.outputs)


class Recordings:
    """The recordings by what may not differ between calls.

    Args:
        record: makes one from a function of a list of tensors and the first values of these.
        limit: how many are kept.
    """

    def __init__(self, record: Callable[[Callable, list[Tensor]], Recording], limit: int = LIMIT):
        self.record, self.limit = record, limit
        self.kept: OrderedDict[Hashable, Recording | None] = OrderedDict()
        # Backward passes run in threads of autograd's, one for each device.
        self.lock = threading.Lock()

    def run(self, key: Hashable, call: Callable, values: list[Tensor]) -> tuple[Tensor, ...]:
        """``call(values)``, by a recording from the second time on.

        Once is not enough: the batches of an epoch may all differ in length, and recording costs many calls.
        """
        with self.lock:
            known = key in self.kept
            recording = self.kept.get(key)
            if known and recording is None:
                recording = self.record(call, values)
            self.kept[key] = recording
            self.kept.move_to_end(key)
            self._forget()
            # Under the lock, because values that two threads copy in would mix.
            if recording is not None:
                return recording(values)
        return call(values)

    def shorten(self, limit: int) -> None:
        """Lets recordings go until there are no more than ``limit``, also from now on."""
        with self.lock:
            self.limit = limit
            self._forget()

    def _forget(self) -> None:
        """Lets the least recently used recordings go; keys without one cost nothing and stay longer."""
        held = [key for key, recording in self.kept.items() if recording is not None]
        for key in held[: len(held) - self.limit]:
            self.kept.pop(key).settle()
        while len(self.kept) > 100 * self.limit:
            _, recording = self.kept.popitem(last=False)
            if recording is not None:
                recording.settle()


def record(call: Callable, values: list[Tensor]) -> Recording:
    """Captures ``call`` on the current device in a CUDA graph."""
    inputs = [value.clone() for value in values]
    current, side = torch.cuda.current_stream(), _capture_stream(torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(current)
    # It brings the current stream back also where a capture fails.
    with torch.cuda.stream(side):
        # Compiling kernels and taking work space cannot be captured, and happen in a first run.
        call(inputs)
        # Other threads (NCCL's watchdog, a loader that pins memory) may use CUDA meanwhile.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            outputs = call(inputs)
    current.wait_stream(side)
    return Recording(inputs, tuple(outputs), graph.replay, current.synchronize)


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream that a device's graphs are recorded on: libraries keep work space for every one they see."""
    return torch.cuda.Stream(device)


_recordings = Recordings(record)
_inner = threading.local()


@contextlib.contextmanager
def keeping(limit: int) -> Iterator[None]:
    """Keeps up to ``limit`` recordings of loops meanwhile, where many shapes come back in turn."""
    before, _recordings.limit = _recordings.limit, limit
    try:
        yield
    finally:
        _recordings.shorten(before)


def wanted() -> bool:
    """Whether RHHN_CUDA_GRAPHS asks for graphs.

    Raises:
        UsageError: it holds neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise UsageError(f"{VARIABLE}={value} is unknown, choose from 0, 1")
    return value == "1"


def applies(values: Sequence[Tensor]) -> bool:
    """Whether a call can run as a graph: on a GPU, and where nothing else captures or casts."""
    return (
        all(value.is_cuda for value in values)
        and not torch.cuda.is_current_stream_capturing()
        and not torch.is_autocast_enabled("cuda")
    )


def place(values: Sequence[Tensor]) -> Hashable:
    """Where a call runs: recordings of different streams never share memory."""
    device = values[0].device
    return device, torch.cuda.current_stream(device).cuda_stream


def captured(body: Callable) -> Callable:
    """An operation's body, of positional arguments, that runs as a CUDA graph where that ``applies``.

    Tensors, alone or in lists, may differ in value from call to call; all other arguments are in the key.
    """

    @functools.wraps(body)
    def run(*args):
        values = tensors_of(args)
        if not possible(values):
            return body(*args)
        rest = (body.__qualname__, key_of(args))
        return replayed(rest, lambda tensors: body(*with_tensors(args, tensors)), values, _recordings)

    return run


def possible(values: Sequence[Tensor]) -> bool:
    """Whether a call of these tensors is to run as a graph of its own."""
    return wanted() and not getattr(_inner, "busy", False) and applies(values)


def replayed(
    key: Hashable, call: Callable, values: Sequence[Tensor], recordings: Recordings
) -> tuple[Tensor, ...]:
    """``call(values)`` where it is ``possible``, by one of ``recordings`` from the second time on.

    Args:
        key: all that the call depends on beside the values; their shapes, the device, the stream and the
            modes of torch are added to it.
    """
    modes = (place(values), matmul_precision("cuda"), torch.is_inference_mode_enabled())
    # What runs inside is a part of this graph and has none of its own.
    _inner.busy = True
    try:
        with torch.cuda.device_of(values[0]):
            return recordings.run((key, modes, key_of(values)), call, values)
    finally:
        _inner.busy = False


def tensors_of(args: Sequence) -> list[Tensor]:
    """The tensors among arguments and in lists among them, in their order."""
    parts = (arg if _is_list(arg) else [arg] for arg in args)
    return [part for some in parts for part in some if isinstance(part, Tensor)]


def with_tensors(args: Sequence, tensors: Sequence[Tensor]) -> list:
    """The arguments with other tensors in place of theirs."""
    others = iter(tensors)

    def other(arg):
        if _is_list(arg):
            return [other(part) for part in arg]
        return next(others) if isinstance(arg, Tensor) else arg

    return [other(arg) for arg in args]


def key_of(args: Sequence) -> Hashable:
    """What a recording depends on: shapes, strides and types of tensors, everything else by value."""

    def key(arg):
        if _is_list(arg):
            return tuple(key(part) for part in arg)
        return (arg.shape, arg.stride(), arg.dtype) if isinstance(arg, Tensor) else arg

    return tuple(key(arg) for arg in args)


def _is_list(arg) -> bool:
    return isinstance(arg, list | tuple)
