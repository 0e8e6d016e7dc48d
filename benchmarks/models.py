"""What the benchmarks of layers and of whole models share: the rows of their reports, beside a baseline's."""

from collections.abc import Hashable, Sequence

import numpy as np

from benchmarks.parity import Contender
from benchmarks.report import ROUNDS
from benchmarks.timing import ratio


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
        parts = np.median(seconds[key].reshape(len(own), -1), axis=0)
        titles = ("forward ms", "backward ms")[: len(parts) if len(parts) > 1 else 0]
        rows.append(
            {"name": key[0], "backend": key[1], "type": contender.dtype}
            | {"parameters": sum(p.numel() for p in contender.module.parameters())}
            | {title: 1e3 * float(part) for title, part in zip(titles, parts, strict=False)}
            | {"total ms": 1e3 * float(np.median(own)), "tokens/s": count / float(np.median(own))}
            | {f"/ {baseline[0]}": ratio(own, passes[baseline])}
            | {"/ reference": None if reference is None else float(np.median(own / reference))}
            | {"error": errors[key], ROUNDS: seconds[key].tolist()}
        )
    return rows
