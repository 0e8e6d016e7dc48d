"""Fused operations as CUDA graphs: the thousands of small launches of a loop become one.

RHHN_CUDA_GRAPHS=0 turns them off. An operation's body is recorded the second time it is called with the same
shapes, types and numbers on the same stream, and replayed from then on. Where lengths vary, ``lengths`` maps
many of them to one. A recording owns its inputs and outputs: arguments are copied in and results copied out,
so calls between a forward and its backward never overwrite what autograd saves or accumulates. Layers of the
same shape share a recording.

The copies cost one more pass over memory per call. A recording costs the memory of its inputs and outputs,
and what the driver keeps for its kernels. Its intermediate results share memory with all other recordings of
the stream, because they need not outlive a replay. There are at most ``LIMIT`` recordings, in ``SHARE`` of
the device's memory; calls that find no room run without a graph. A single recording is never dropped, because
that would not free what it shares; if most calls no longer find room, all are dropped at once.
"""

import contextlib
import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rhhn_fairseq.ops import policy
from rhhn_fairseq.ops.library import flatten, unflatten
from rhhn_fairseq.ops.matmul.gemm import matmul_precision

logger = logging.getLogger(__name__)

LIMIT = 256
"""Recordings kept: forward and backward of a few kinds of layers for some thirty lengths."""

KEYS = 2000
"""Number of calls that are remembered without being recorded."""

SHARE = 0.25
"""Share of a device's memory that recordings may take."""

PATIENCE = 500
"""Refused calls after which all recordings are dropped, if fewer calls were replayed; doubles each time."""


@dataclass
class Recording:
    """A call that can be repeated with other values: it reads ``inputs`` and writes ``outputs``."""

    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    replay: Callable[[], None]
    settle: Callable[[], None]
    """Waits until no replay is running, so that the memory may be freed."""
    pool: Any = None
    """The memory pool of everything else that it writes."""
    kernels: int = 0
    """Bytes that the driver keeps for its kernels."""

    @property
    def size(self) -> int:
        """Bytes that it does not share with other recordings."""
        return self.kernels + sum(tensor.nbytes for tensor in (*self.inputs, *self.outputs))

    def __call__(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for own, value in zip(self.inputs, values, strict=True):
            own.copy_(value)
        self.replay()
        return tuple(output.clone() for output in self.outputs)


def memory_of_device() -> float:
    """Returns the bytes of memory of the device; infinite without a GPU, where graphs are only imitated."""
    if not torch.cuda.is_available():
        return float("inf")
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


class Recordings:
    """Recordings by the place where they run and by all else that must be the same in every call.

    Args:
        record: makes a recording from a function of a list of tensors, their first values, and another
            recording of the same place or None.
        limit: number of recordings. share: share of the device's memory that all of them may take.
        memory: returns the bytes of memory of the device.
    """

    def __init__(
        self,
        record: Callable[[Callable, Sequence[Tensor], Recording | None], Recording],
        limit: int = LIMIT,
        share: float = SHARE,
        memory: Callable[[], float] = memory_of_device,
    ):
        self.record, self.limit, self.share, self.memory = record, limit, share, memory
        self.kept: dict[tuple[Hashable, Hashable], Recording] = {}
        self.met: OrderedDict[Hashable, None] = OrderedDict()
        self.too_large: set[tuple[Hashable, Hashable]] = set()
        self.patience, self.replays, self.refused = PATIENCE, 0, 0
        self.told = False
        """Whether the log says that there was no room."""
        self.size = 0
        """Bytes that the recordings do not share."""
        # Backward passes run in autograd's threads, one for each device.
        self.lock = threading.Lock()

    def run(
        self, where: Hashable, what: Hashable, call: Callable, values: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Runs ``call(values)``, by a recording from the second time on.

        Once is not enough: the batches of an epoch may all differ in length, and recording costs many calls.
        If memory runs out, all recordings are dropped for the call.

        Args:
            where: see ``place``. what: everything else that ``call`` depends on besides the values.
        """
        try:
            return self._run((where, what), call, values)
        except torch.OutOfMemoryError:
            with self.lock:
                if not self.kept:
                    raise
                logger.info("out of memory: all %d CUDA graphs are dropped", len(self.kept))
                self._let_go()
        return call(values)

    def _run(
        self, key: tuple[Hashable, Hashable], call: Callable, values: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        with self.lock:
            if key not in self.kept and key not in self.too_large and self._met(key) and self._room():
                self._keep(key, call, values)
            # Under the lock, because two threads would overwrite each other's inputs.
            if key in self.kept:
                self.replays += 1
                return self.kept[key](values)
        return call(values)

    def _met(self, key: Hashable) -> bool:
        """Whether this call was seen before; remembers it."""
        known = key in self.met
        self.met[key] = None
        self.met.move_to_end(key)
        if len(self.met) > KEYS:
            self.met.popitem(last=False)
        return known

    def _room(self) -> bool:
        """Whether one more recording may be made. After many refusals, all others are dropped for it."""
        if len(self.kept) < self.limit and self.size < self.share * self.memory():
            return True
        self.refused += 1
        if not self.told:
            self.told = True
            note = "the limit of CUDA graphs is reached (%d graphs, %.1f GB); other calls run without graphs"
            logger.info(note, len(self.kept), self.size / 1e9)
        if self.refused < self.patience:
            return False
        worthwhile = self.replays < self.refused
        self.replays = self.refused = 0
        if worthwhile:
            # If room runs out again, there are too many calls to record.
            self.patience *= 2
            self._let_go()
        return worthwhile

    def _keep(self, key: tuple[Hashable, Hashable], call: Callable, values: Sequence[Tensor]) -> None:
        """Makes a recording, unless memory runs out."""
        beside = next((recording for (where, _), recording in self.kept.items() if where == key[0]), None)
        try:
            self.kept[key] = self.record(call, values, beside)
            self.size += self.kept[key].size
        except BaseException as error:
            # A failed capture leaves the memory they share in an unknown state.
            self._let_go()
            if not is_out_of_memory(error):
                raise
            logger.info("out of memory while recording a CUDA graph; calls of this shape run without graphs")
            self.too_large.add(key)

    def _let_go(self) -> None:
        for recording in self.kept.values():
            recording.settle()
        self.kept.clear()
        self.size = 0
        if torch.cuda.is_available():
            # Nothing holds the memory that they shared any longer.
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. torch's allocator, CUDA making a graph, and cuBLAS have different messages."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)


def record(call: Callable, values: Sequence[Tensor], beside: Recording | None = None) -> Recording:
    """Captures ``call`` on the current device in a CUDA graph.

    Args:
        beside: a recording that never runs at the same time, so that its memory may be shared.
    """
    inputs = [value.clone() for value in values]
    current, side = torch.cuda.current_stream(), _capture_stream(torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle() if beside is None else beside.pool
    side.wait_stream(current)
    # This restores the current stream even if a capture fails.
    with torch.cuda.stream(side):
        # Compilation of kernels cannot be captured, so it happens in a first run.
        call(inputs)
        before = _taken_by_driver()
        # Other threads (NCCL's watchdog, a loader that pins memory) may use CUDA meanwhile.
        with (
            _allocating_elsewhere_after(pool),
            _work_space_of_its_own(),
            torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"),
        ):
            outputs = call(inputs)
        # The first replay takes what the driver needs.
        graph.replay()
        kernels = max(0, _taken_by_driver() - before)
    current.wait_stream(side)
    return Recording(inputs, tuple(outputs), graph.replay, current.synchronize, pool, kernels)


@contextlib.contextmanager
def _allocating_elsewhere_after(pool) -> Iterator[None]:
    """Takes the allocator out of the graph's pool if a capture fails; torch before 2.13 leaves it there."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise


@contextlib.contextmanager
def _work_space_of_its_own() -> Iterator[None]:
    """Makes products captured inside take their workspace from the graph's pool, where it lasts as long.

    Otherwise graphs of a stream would share one with each other and with other work there, and the end of any
    graph would free it for all (torch._inductor guards against this too).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def _taken_by_driver() -> int:
    """Returns the bytes of device memory in use outside torch, including those of other processes."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Returns the one stream that records a device's graphs: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


_recordings = Recordings(record)
_inner = threading.local()


@contextlib.contextmanager
def keeping(limit: int, share: float) -> Iterator[None]:
    """Changes the limits of recordings inside a ``with`` block, where many shapes come back; at its end all
    are dropped."""
    before = _recordings.limit, _recordings.share
    _recordings.limit, _recordings.share = limit, share
    try:
        yield
    finally:
        with _recordings.lock:
            _recordings.limit, _recordings.share = before
            _recordings._let_go()


def applies(device: torch.device) -> bool:
    """Whether calls on a device can run as graphs: on a GPU, and while nothing else captures."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def place(values: Sequence[Tensor]) -> Hashable:
    """Returns a call's device and stream: recordings of two streams may run at once and share no memory."""
    device = values[0].device
    return device, torch.cuda.current_stream(device).cuda_stream


def captured(body: Callable) -> Callable:
    """Wraps an operation's body, of positional arguments, to run as a CUDA graph where that is ``possible``.

    Tensors, alone or in lists, may differ in value from call to call; all other arguments are in the key.
    Autocast is off inside: operands already have the types that the body needs, and float32 must stay so.
    """

    @functools.wraps(body)
    def run(*args):
        leaves, lengths = flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        device = tensors[0].device
        with torch.autocast(device.type, enabled=False):
            if not possible(device):
                return body(*args)

            def call(given):
                others = iter(given)
                filled = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                return body(*unflatten(filled, lengths))

            fixed = tuple("tensor" if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            return replayed((body.__qualname__, tuple(lengths), fixed), call, tensors, _recordings)

    return run


def possible(device: torch.device) -> bool:
    """Whether calls on a device should run as graphs of their own."""
    return policy.current().graphs and not getattr(_inner, "busy", False) and applies(device)


def replayed(
    key: Hashable, call: Callable, values: Sequence[Tensor], recordings: Recordings
) -> tuple[Tensor, ...]:
    """Runs ``call(values)`` where it is ``possible``, by one of ``recordings`` from the second time on.

    Args:
        key: all that the call depends on besides the values; their shapes, the device, the stream and the
            modes of torch are added to it.
    """
    modes = (matmul_precision("cuda"), torch.is_inference_mode_enabled())
    # Calls inside belong to this graph and have none of their own.
    _inner.busy = True
    try:
        with torch.cuda.device_of(values[0]):
            layout = tuple((value.shape, value.stride(), value.dtype) for value in values)
            return recordings.run(place(values), (key, modes, layout), call, values)
    finally:
        _inner.busy = False
