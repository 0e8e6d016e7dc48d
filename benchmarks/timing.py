"""Rounds in which every contender runs once, and their statistics.

All contenders run in one process in turn, round after round, so that other work on the machine slows all
of them: their ratios can be trusted even if their milliseconds cannot.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.machine import first_calls, now
from rhhn_fairseq.ops.memory import keep_freed_memory


def interleave(keys: Sequence[Hashable], repeats: int, measure: Callable) -> dict[Hashable, np.ndarray]:
    """Measures every key once per round, for ``repeats`` rounds after a warm-up round.

    If a key names a backend in CUDA graphs, there are two warm-up rounds, since the second call records them.
    Freed memory is kept during and after the rounds, as in training; see ``rhhn_fairseq.ops.memory``.

    Args:
        measure: maps a key to seconds, or to a tuple of seconds.

    Returns:
        seconds [repeats] or [repeats, ·] by key.
    """
    keep_freed_memory()
    unused = max(map(first_calls, keys))
    rounds: list[list] = [[] for _ in range(repeats + unused)]
    order = [(row, key) for row in rounds for key in keys]
    for row, key in tqdm(order, disable=None, leave=False, unit="pass"):
        row.append(measure(key))
    return dict(zip(keys, np.array(rounds[unused:]).swapaxes(0, 1), strict=True))


def ratio(seconds: np.ndarray, base: np.ndarray) -> list[float]:
    """Returns the median, smallest and largest ratio of two contenders' seconds [repeats].

    They are taken within a round, so that a slow moment of the machine cancels out.
    """
    ratios = seconds / base
    return [float(np.median(ratios)), float(ratios.min()), float(ratios.max())]


def time_pass(module: nn.Module, x_TBC: Tensor, gradient_TBH: Tensor) -> tuple[float, float]:
    """Returns the seconds of a forward and a backward pass, to input and parameters, from no gradients."""
    module.zero_grad(set_to_none=True)
    x_TBC = x_TBC.detach().requires_grad_()
    start = now(x_TBC.device)
    y, _ = module(x_TBC)
    middle = now(x_TBC.device)
    y.backward(gradient_TBH)
    return middle - start, now(x_TBC.device) - middle
