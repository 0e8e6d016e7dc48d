"""``memory``: peak memory of a cell's forward and backward pass by backend, relative to the eager reference.

On the CPU every pass runs in its own process, and its figure is the peak of resident memory less what was
resident before. On a GPU it is the peak of torch's allocator less what was allocated before. Weights, input
and output gradient exist before the pass; states, saved activations, buffers and gradients do not. CUDA
graphs are left out, because they hold their memory between passes.

Run as a module, it measures one contender, whose description it reads from its standard input.
"""

import contextlib
import ctypes
import gc
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from rhhn_fairseq.bench.contenders import (
    BASELINE,
    COMPILE,
    MOST,
    Contender,
    SizesConfig,
    batch_for,
    check_contenders,
    check_names,
    contenders_of,
)
from rhhn_fairseq.bench.machine import first_calls, measuring
from rhhn_fairseq.bench.report import Column, draw_bars, make_report
from rhhn_fairseq.bench.timing import time_pass
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.registry import CELLS
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.programs import interpreter


@dataclass(frozen=True, kw_only=True)
class Config(SizesConfig):
    """What is measured; ``UsageError`` names a value that cannot work."""

    length: int = option(100, help="steps of a sequence", low=1, high=MOST)
    repeats: int = option(3, help="passes of each contender", low=1)
    cells: tuple = option(("ln_hyperlstm",), help="names of cells, separated by commas")
    compile: str = option(
        "none",
        help="also measure the reference under torch.compile: one step, or the sequence",
        choices=COMPILE,
    )

    def __post_init__(self):
        super().__post_init__()
        check_names("cells", self.cells, sorted(CELLS))
        for name in self.backends:
            if first_calls(name) > 1:
                raise UsageError(
                    f"--backends {name}: what a graph holds stays between passes, name the backend alone"
                )


SMOKE = dict(
    hidden=64, input=16, batch=16, length=16, hyper_size=16, hyper_embed_size=4, rhn_depth=2, repeats=1
)

COLUMNS = (
    Column("cell", "cell"),
    Column("backend", "backend"),
    Column("type", "dtype"),
    Column("peak MB", "peak_mb", ".1f"),
    Column("min..max", "peak_mb_min peak_mb_max", ".1f"),
    Column("/ reference", "ratio", ".2f"),
    Column("error", "error", ".1e"),
)


def run(config: Config) -> dict:
    """Checks all contenders and measures each ``repeats`` times, in turn.

    Raises:
        UsageError: a cell gives wrong results, or the system does not report a process's memory.
    """
    with measuring(config):
        contenders, errors = [], {}
        for name in (BASELINE, *config.cells):
            layers = [c for c in contenders_of(name, config, config.compile) if first_calls(c.forces) == 1]
            errors |= check_contenders(layers, config)
            contenders += layers
        peaks = {contender.key: [] for contender in contenders}
        total = config.repeats * len(contenders)
        with tqdm(total=total, disable=None, leave=False, unit="pass") as progress:
            for _ in range(config.repeats):
                for contender in contenders:
                    progress.set_postfix_str(" ".join(contender.key))
                    peaks[contender.key].append(peak_of(contender, config))
                    progress.update()
        rows = [_row(contender, errors[contender.key], peaks) for contender in contenders]
        return make_report("memory", config, rows)


def _row(contender: Contender, errors: dict, peaks: dict) -> dict:
    name, backend, dtype = contender.key
    own = np.array(peaks[contender.key]) / 1e6
    reference = peaks.get((name, "reference", dtype))
    return {
        "cell": name,
        "backend": backend,
        "dtype": dtype,
        "error": errors[dtype],
        "peak_mb": float(np.median(own)),
        "peak_mb_min": float(own.min()),
        "peak_mb_max": float(own.max()),
        "ratio": float(np.median(own) / (np.median(reference) / 1e6)) if reference else None,
        "bytes": peaks[contender.key],
    }


def peak_of(contender: Contender, config: Config) -> int:
    """Returns the peak of bytes that a contender's pass needs beyond what was there before it."""
    if torch.device(config.device).type == "cuda":
        return _peak_on_gpu(contender, config)
    order = {"config": asdict(config), "key": contender.key}
    # Its standard error is that of this process.
    result = subprocess.run(
        interpreter("-m", __name__), input=json.dumps(order), stdout=subprocess.PIPE, text=True
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


def peak_of_this_process(config: Config, key: tuple[str, str, str]) -> int:
    """Returns ``peak_of`` on the CPU, in a process that has done nothing else yet.

    Raises:
        UsageError: the sizes are too small, or the system has no /proc.
    """
    name = key[0]
    with measuring(config):
        contender = next(c for c in contenders_of(name, config, config.compile) if c.key == key)
        x, gradient = batch_for(config, contender.dtype)
        with contender.running() as module:
            # A short pass first creates what is made once: threads, workspaces, compiled steps.
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


def draw(report: dict):
    """Returns a bar chart of the peaks relative to the eager reference's."""
    return draw_bars(report, ("cell", "backend", "dtype"), "peak memory / reference")


def main() -> None:
    order = json.loads(sys.stdin.read())
    lists = {key: tuple(value) for key, value in order["config"].items() if isinstance(value, list)}
    print(peak_of_this_process(Config(**order["config"] | lists), tuple(order["key"])))


if __name__ == "__main__":
    from rhhn_fairseq.cli import run as run_main

    sys.exit(run_main(main))
