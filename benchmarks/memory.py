"""Peak memory of a cell's forward and backward pass by backend, relative to the eager reference.

On the CPU every pass runs in its own process, and its figure is the peak of resident memory less what was
resident before. On a GPU it is the peak of torch's allocator less what was allocated before. Weights, input
and output gradient exist before the pass; states, saved activations, buffers and gradients do not. CUDA
graphs are left out, because they hold their memory between passes.
"""

import contextlib
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.contenders import BASELINE, SizesConfig, batch_for, check_contenders, contenders_of
from benchmarks.machine import MOST, first_calls, measuring
from benchmarks.parity import Contender
from benchmarks.report import ROUNDS, make_report, start
from benchmarks.timing import time_pass
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.programs import interpreter


@dataclass(frozen=True, kw_only=True)
class Config(SizesConfig):
    """What is measured; ``UsageError`` names a value that cannot work."""

    length: int = option(100, help="steps of a sequence", low=1, high=MOST)
    repeats: int = option(3, help="passes of each contender", low=1)
    cells: tuple = option(("ln_hyperlstm",), help="names of cells, separated by commas")


SMOKE = dict(
    hidden=64, input=16, batch=16, length=16, hyper_size=16, hyper_embed_size=4, rhn_depth=2, repeats=1
)

def run(config: Config) -> dict:
    """Checks all contenders and measures each ``repeats`` times, in turn.

    Raises:
        UsageError: a cell gives wrong results, or the system does not report a process's memory.
    """
    with measuring(config):
        contenders: dict[tuple, Contender] = {}
        errors: dict[tuple, float] = {}
        for name in (BASELINE, *config.cells):
            layers = [c for c in contenders_of(name, config) if first_calls(c.forces) == 1]
            errors |= check_contenders(layers, config)
            contenders |= {contender.key: contender for contender in layers}
        peaks: dict[tuple, list[int]] = {key: [] for key in contenders}
        order = [key for _ in range(config.repeats) for key in contenders]
        for key in tqdm(order, disable=None, leave=False, unit="pass"):
            peaks[key].append(peak_of(contenders[key], config))
        return make_report("memory", config, [_row(key, errors[key], peaks) for key in contenders])


def _row(key: tuple[str, str, str], error: float, peaks: dict) -> dict:
    name, backend, dtype = key
    own, reference = np.array(peaks[key]) / 1e6, peaks.get((name, "reference", dtype))
    return {
        "cell": name,
        "backend": backend,
        "type": dtype,
        "peak MB": [float(np.median(own)), float(own.min()), float(own.max())],
        "/ reference": float(np.median(own) / (np.median(reference) / 1e6)) if reference else None,
        "error": error,
        ROUNDS: peaks[key],
    }


def peak_of(contender: Contender, config: Config) -> int:
    """Returns the peak of bytes that a contender's pass needs beyond what was there before it."""
    if torch.device(config.device).type == "cuda":
        return _peak_on_gpu(contender, config)
    order = {"config": asdict(config), "key": contender.key}
    # Its standard error is that of this process.
    code = f"from {__spec__.name} import measure_one; measure_one()"
    result = subprocess.run(
        interpreter("-c", code),
        input=json.dumps(order),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if result.returncode:
        raise UsageError(f"memory: the process that measures {' '.join(contender.key)} failed, see above")
    return json.loads(result.stdout)


def _peak_on_gpu(contender: Contender, config: Config) -> int:
    x, gradient = batch_for(config, contender.dtype)
    with contender.running() as module:
        # The first pass allocates what stays: workspaces of libraries, compiled kernels.
        time_pass(module, x, gradient)
        module.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        time_pass(module, x, gradient)
        module.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated(x.device) - before


def measure_one() -> None:
    """Prints the peak of one contender, which the standard input describes, in a process of its own."""
    order = json.loads(sys.stdin.read())
    lists = {key: tuple(value) for key, value in order["config"].items() if isinstance(value, list)}
    print(peak_of_this_process(Config(**order["config"] | lists), tuple(order["key"])))


def peak_of_this_process(config: Config, key: tuple[str, str, str]) -> int:
    """Returns ``peak_of`` on the CPU, in a process that has done nothing else yet.

    Raises:
        UsageError: the sizes are too small, or the system has no /proc.
    """
    with measuring(config):
        contender = next(c for c in contenders_of(key[0], config) if c.key == key)
        x, gradient = batch_for(config, contender.dtype)
        with contender.running() as module:
            # A short pass first creates what is made once: threads and workspaces.
            time_pass(module, x[:1], gradient[:1])
            module.zero_grad(set_to_none=True)
            gc.collect()
            # Freed memory that the allocator keeps would be reused without being counted.
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
            # If the kernel does not allow this, the old peak remains; it is checked below.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            before, peak_before = _resident(), _resident("VmHWM")
            time_pass(module, x, gradient)
            peak = _resident("VmHWM")
    if peak <= peak_before:
        raise UsageError("memory: the pass takes less than what came before it, choose larger sizes")
    return peak - before


def _resident(field: str = "VmRSS") -> int:
    """Returns the resident bytes of this process: now, or with ``VmHWM`` the peak so far.

    The figure of getrusage is no substitute: a new process starts with its parent's figure.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError as error:
        raise UsageError("memory: measuring on the CPU needs the /proc of Linux") from error
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)[1])


if __name__ == "__main__":
    start(__name__)
