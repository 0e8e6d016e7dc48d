"""Peak memory of a cell's forward and backward pass by backend, relative to the eager reference.

It is the peak of what torch's allocators have given out, less what they had given out before the pass: on the
CPU by torch's profiler, on a GPU by the allocator's own statistics. Weights, input and output gradient exist
before the pass; states, saved activations, buffers and gradients do not. CUDA graphs are left out, because
they hold their memory between passes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.contenders import BASELINE, SizesConfig, batch_for, check_contenders, contenders_of
from benchmarks.machine import MOST, first_calls, measuring
from benchmarks.report import ROUNDS, make_report, start
from benchmarks.timing import interleave, time_pass
from rhhn_fairseq.cells.config import option


@dataclass(frozen=True, kw_only=True)
class Config(SizesConfig):
    """What is measured; ``UsageError`` names a value that cannot work."""

    length: int = option(100, help="steps of a sequence", low=1, high=MOST)
    repeats: int = option(1, help="passes of each contender, after one warm-up pass", low=1)
    cells: tuple = option(("ln_hyperlstm",), help="names of cells, separated by commas")


SMOKE = dict(hidden=16, input=8, batch=4, length=4, hyper_size=8, hyper_embed_size=4, rhn_depth=2)


def run(config: Config) -> dict:
    """Checks all contenders and measures each ``repeats`` times, in turn.

    Raises:
        UsageError: a cell gives wrong results.
    """
    with measuring(config):
        contenders, errors = {}, {}
        for name in (BASELINE, *config.cells):
            layers = [c for c in contenders_of(name, config) if first_calls(c.forces) == 1]
            errors |= check_contenders(layers, config)
            contenders |= {contender.key: contender for contender in layers}

        def measure(key):
            x, gradient = batch_for(config, contenders[key].dtype)
            with contenders[key].running() as module:
                module.zero_grad(set_to_none=True)
                peak = peak_of(lambda: time_pass(module, x, gradient), x.device)
                module.zero_grad(set_to_none=True)
            return peak

        peaks = interleave(list(contenders), config.repeats, measure)
        return make_report("memory", config, [_row(key, errors[key], peaks) for key in contenders])


def _row(key: tuple[str, str, str], error: float, peaks: dict) -> dict:
    name, backend, dtype = key
    own, reference = peaks[key] / 1e6, peaks.get((name, "reference", dtype))
    return {
        "cell": name,
        "backend": backend,
        "type": dtype,
        "peak MB": [float(np.median(own)), float(own.min()), float(own.max())],
        "/ reference": None if reference is None else float(np.median(own) / (np.median(reference) / 1e6)),
        "error": error,
        ROUNDS: peaks[key].tolist(),
    }


def peak_of(call: Callable[[], object], device: torch.device) -> int:
    """Returns the peak of bytes that a call holds on a device, beyond what was held before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return max(0, *held.tolist())


if __name__ == "__main__":
    start(__name__)
