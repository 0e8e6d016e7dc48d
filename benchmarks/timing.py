"""Rounds in which every contender runs once, their statistics, and the rows of a report.

All contenders run in one process in turn, round after round, so that other work on the machine slows all
of them: their ratios can be trusted even if their milliseconds cannot.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.machine import first_calls, now
from benchmarks.parity import Contender
from benchmarks.report import ROUNDS
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


def time_pass(module: nn.Module, x_TBC: Tensor, gradient_TBH: Tensor) -> tuple[float, float]:
    """Returns the seconds of a forward and a backward pass, to input and parameters, from no gradients."""
    module.zero_grad(set_to_none=True)
    x_TBC = x_TBC.detach().requires_grad_()
    start = now(x_TBC.device)
    y, _ = module(x_TBC)
    middle = now(x_TBC.device)
    y.backward(gradient_TBH)
    return middle - start, now(x_TBC.device) - middle


class Dictionaries:
    """The attributes of a task that models and criteria read."""

    def __init__(self, dictionary):
        self.source_dictionary = self.target_dictionary = dictionary
        self.cfg = None


def rows_of(
    contenders: Sequence[Contender], errors: dict, seconds: dict[Hashable, np.ndarray], count: int
) -> list[dict]:
    """Returns the rows of a report.

    Args:
        contenders: the first of each type is what the others of that type are compared with.
        seconds: [repeats], or forward and backward [repeats, 2], by key. count: symbols or tokens of a pass.
    """
    passes = {key: own.reshape(len(own), -1).sum(axis=1) for key, own in seconds.items()}
    baselines, rows = {}, []
    for contender in contenders:
        key, own = contender.key, passes[contender.key]
        baseline = baselines.setdefault(contender.dtype, key)
        reference = None if key[1] == "reference" else passes.get((key[0], "reference", *key[2:]))
        # Within a round, so that a slow moment of the machine cancels out.
        ratios = own / passes[baseline]
        parts = np.median(seconds[key].reshape(len(own), -1), axis=0)
        titles = ("forward ms", "backward ms")[: len(parts) if len(parts) > 1 else 0]
        rows.append(
            {"name": key[0], "backend": key[1], "type": contender.dtype}
            | {"parameters": sum(p.numel() for p in contender.module.parameters())}
            | {title: 1e3 * float(part) for title, part in zip(titles, parts, strict=False)}
            | {"total ms": 1e3 * float(np.median(own)), "tokens/s": count / float(np.median(own))}
            | {f"/ {baseline[0]}": [float(np.median(ratios)), float(ratios.min()), float(ratios.max())]}
            | {"/ reference": None if reference is None else float(np.median(own / reference))}
            | {"error": errors[key], ROUNDS: seconds[key].tolist()}
        )
    return rows
