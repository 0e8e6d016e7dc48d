"""The machine a benchmark runs on: device, threads, forced backends, and what the figures depend on."""

import contextlib
import os
import platform
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from rhhn_fairseq.allocator import keeps_freed_memory
from rhhn_fairseq.cells.config import check_fields, option
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import policy
from rhhn_fairseq.ops.backends import graphs
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.matmul.gemm import matmul_precision, set_matmul_precision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

IN_GRAPHS = "+graphs"
"""Suffix of the names of backends whose loops run as CUDA graphs."""

RECORDINGS = 1000
"""The number of CUDA graphs to keep: those of all contenders, which run in turn."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The options of every benchmark; ``UsageError`` names a value that cannot work."""

    repeats: int = option(7, help="timed rounds, after one warm-up round", low=1, high=10**6)
    threads: int = option(0, help="CPU threads; 0: torch's default", low=0, high=4096)
    device: str = option("cpu", help="cpu or cuda")

    def __post_init__(self):
        check_fields(self)
        check_device(self.device)


def check_distinct(option: str, names: Sequence[str]) -> None:
    """Raises UsageError if a name is given twice."""
    if len(set(names)) < len(names):
        raise UsageError(f"--{option} {','.join(names)} names one twice")


def check_device(text: str) -> None:
    """Raises UsageError unless torch can run on the device called ``text``."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    # torch accepts any index of a CPU.
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise UsageError(f"Bench: device={text!r} is unknown, choose from cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"Bench: device={text!r}, but torch finds {torch.cuda.device_count()} CUDA devices")


def now(device) -> float:
    """Waits until the device has finished its work, then returns the time in seconds."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_graphs(backends: Sequence[str], device: str) -> tuple[str, ...]:
    """Returns the names of the backends that can run as CUDA graphs on a device, with ``IN_GRAPHS`` added."""
    recorded = [name for name in backends if name in ("aten", "triton")] if records(device) else []
    return tuple(name + IN_GRAPHS for name in recorded)


def records(device: str) -> bool:
    """Whether a device supports CUDA graphs."""
    return torch.device(device).type == "cuda"


def first_calls(contender: Hashable) -> int:
    """Returns the number of calls before timing is stable: CUDA graphs are recorded in the second call.

    Args:
        contender: a backend's name, or a tuple that holds it.
    """
    return 2 if IN_GRAPHS in str(contender) else 1


@contextlib.contextmanager
def forced(backend: str | None) -> Iterator[None]:
    """Runs cells on a backend regardless of the environment; None selects the preferred one.

    CUDA graphs are used if the name is one that ``in_graphs`` returns.
    """
    changes = {"kernel": None, "graphs": False}
    if backend is not None:
        changes = {"kernel": backend.removesuffix(IN_GRAPHS), "graphs": backend.endswith(IN_GRAPHS)}
    with policy.using(**changes):
        yield


@contextlib.contextmanager
def cudnn_for(dtype: str) -> Iterator[None]:
    """Lets cuDNN use a GPU's matrix units for narrow types.

    In bfloat16 torch requests them only if float32 may be rounded to TF32, which ``measuring`` forbids.
    """
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before or dtype != "float32"
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def measuring(config: BenchConfig) -> Iterator[None]:
    """Sets the threads, precision and seed of a run, and raises UsageError if memory runs out.

    Afterwards all settings are as before, except the precision if RHHN_MATMUL_PRECISION sets one.

    Raises:
        UsageError: RHHN_MATMUL_PRECISION or RHHN_MATMUL holds an unknown word, or RHHN_KERNEL is set.
    """
    if (kernel := policy.current().kernel) is not None:
        raise UsageError(f"{policy.KERNEL}={kernel}: benchmarks force backends themselves; unset it")
    set_matmul_precision()
    gemm.check_policy()
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    torch.set_num_threads(config.threads or threads)
    # cuDNN's LSTM rounds float32 to TF32 where torch's own matrix products, which the cells use, do not.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    try:
        with torch.random.fork_rng(devices=[]), _enough_memory(), graphs.keeping(RECORDINGS, share=1.0):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # On a GPU the error has its own class, on the CPU it is a RuntimeError with one of three messages.
        signs = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
        if not isinstance(error, torch.OutOfMemoryError) and not any(sign in str(error) for sign in signs):
            raise
        raise UsageError(
            "Bench: not enough memory: lower the sizes, or name fewer cells, archs or shapes"
        ) from error


def describe_machine(device: str) -> dict[str, str | int]:
    """Returns the properties of the machine and software that timings depend on."""
    description = {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "float32 products": matmul_precision(torch.device(device).type),
        "freed memory": "kept" if keeps_freed_memory() else "given back",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if torch.device(device).type == "cuda":
        description["gpu"] = torch.cuda.get_device_name(device)
        description["cudnn"] = torch.backends.cudnn.version()
    return description


def cpu_model() -> str:
    """Returns the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


class _Names(TorchDispatchMode):
    """Records the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def lstm_algorithm(module: nn.Module, x_TBC: Tensor) -> str:
    """Returns the algorithm that torch runs an ``nn.LSTM`` with, read from a pass; see ``name_algorithm``."""
    with _Names() as names:
        module(x_TBC)
    kernels = set()
    if "_cudnn_rnn" in names.called:
        # A profiler that stays attached would slow every launch that is timed later.
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
        # Only the kernels on the GPU show which of cuDNN's algorithms ran.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            module(x_TBC)
            now(x_TBC.device)
        kernels = {event.key for event in profile.key_averages() if event.device_type == DeviceType.CUDA}
    return name_algorithm(names.called, kernels)


def name_algorithm(operations: set[str], kernels: set[str]) -> str:
    """Returns the implementation of an LSTM, given the names of torch's operations and of the GPU's kernels.

    cuDNN has a standard algorithm, with a kernel or two per step, and persistent ones, whose kernels run the
    whole sequence with the recurrent matrix on the chip and are named accordingly. Without kernel names, as
    when a profiler has no access to the GPU, the algorithm is unknown.
    """
    if "_cudnn_rnn" not in operations:
        return "oneDNN" if "mkldnn_rnn_layer" in operations else "ATen"
    if not kernels:
        return "cuDNN, algorithm unknown"
    persistent = any("persist" in name.lower() for name in kernels)
    return "cuDNN persistent" if persistent else "cuDNN standard"
