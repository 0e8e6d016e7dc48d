"""The machine of a measurement: device, threads, forced backends, and what the figures depend on."""

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from rhhn_fairseq.cells.config import check_fields, option
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import policy
from rhhn_fairseq.ops.backends import graphs
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.matmul.gemm import matmul_precision, set_matmul_precision
from rhhn_fairseq.ops.memory import keeps_freed_memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

IN_GRAPHS = "+graphs"
"""Suffix of the names of backends whose loops run as CUDA graphs."""

RECORDINGS = 1000
"""The number of CUDA graphs to keep: those of all contenders, which run in turn."""

MOST = 10**6
"""Largest size of anything: of these, a layer alone would fill terabytes."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The options of every benchmark; ``UsageError`` names a value that cannot work."""

    repeats: int = option(7, help="timed rounds, after one warm-up round", low=1, high=MOST)
    threads: int = option(0, help="CPU threads; 0: torch's default", low=0, high=4096)
    device: str = option("cpu", help="cpu or cuda")

    def __post_init__(self):
        check_fields(self)
        if not self.device.startswith(("cpu", "cuda")):
            raise UsageError(f"--device {self.device} is unknown, choose from cpu, cuda, cuda:N")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(f"--device {self.device}: torch finds {torch.cuda.device_count()} CUDA devices")


def check_names(option: str, names: tuple[str, ...], known) -> None:
    """Raises UsageError if there are no names, or one is unknown or given twice."""
    for name in names or ("",):
        if name not in known:
            raise UsageError(f"--{option} {name or repr(name)} is unknown, choose from {', '.join(known)}")
    if len(set(names)) < len(names):
        raise UsageError(f"--{option} {','.join(names)} names one twice")


def now(device) -> float:
    """Waits until the device has finished its work, then returns the time in seconds."""
    if records(device):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def records(device) -> bool:
    """Whether a device supports CUDA graphs."""
    return torch.device(device).type == "cuda"


def in_graphs(backends: Sequence[str], device: str) -> tuple[str, ...]:
    """Returns the names of the backends that can run as CUDA graphs on a device, with ``IN_GRAPHS`` added."""
    recorded = [name for name in backends if name in ("aten", "triton")] if records(device) else []
    return tuple(name + IN_GRAPHS for name in recorded)


def first_calls(contender: Hashable) -> int:
    """Returns the number of calls before timing is stable: CUDA graphs are recorded in the second call.

    Args:
        contender: a backend's name, or a tuple that holds it.
    """
    return 2 if IN_GRAPHS in str(contender) else 1


@contextlib.contextmanager
def forced(backend: str | None, dtype: str = "float32") -> Iterator[None]:
    """Runs cells on a backend regardless of the environment; None selects the preferred one.

    CUDA graphs are used if the name is one that ``in_graphs`` returns. For narrow types cuDNN may use a
    GPU's matrix units: torch requests them only if float32 may be rounded to TF32, which ``measuring``
    forbids.
    """
    changes = {"kernel": None, "graphs": False}
    if backend is not None:
        changes = {"kernel": backend.removesuffix(IN_GRAPHS), "graphs": backend.endswith(IN_GRAPHS)}
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = before or dtype != "float32"
    try:
        with policy.using(**changes):
            yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def measuring(config: BenchConfig) -> Iterator[None]:
    """Sets the threads, precision and seed of a run; afterwards all settings are as before.

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
        with torch.random.fork_rng(devices=[]), graphs.keeping(RECORDINGS, share=1.0):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = cudnn


def describe_machine(device: str) -> dict[str, str | int]:
    """Returns the properties of the machine and software that timings depend on."""
    description = {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "float32 products": matmul_precision(torch.device(device).type),
        "freed memory": "kept" if keeps_freed_memory() else "given back",
        "commit": commit(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if records(device):
        description["gpu"] = torch.cuda.get_device_name(device)
        description["cudnn"] = torch.backends.cudnn.version()
    return description


def cpu_model() -> str:
    """Returns the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Returns the checkout's commit, with ``+`` if files differ from it; "" outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=10"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    except OSError:
        return ""
    return "" if result.returncode else result.stdout.strip()
