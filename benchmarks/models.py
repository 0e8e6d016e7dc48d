"""What the benchmarks of whole models share: their tables, and rows of seconds beside a baseline's."""

from collections.abc import Callable

import numpy as np

from benchmarks.parity import Contender, check
from benchmarks.report import ROUNDS
from benchmarks.timing import interleave, ratio
from rhhn_fairseq.cli.describing import count_parameters


class Dictionaries:
    """The attributes of a task that models and criteria read."""

    def __init__(self, dictionary):
        self.source_dictionary = self.target_dictionary = dictionary
        self.cfg = None


def rows_of(
    contenders: list[Contender], collect: Callable, measure: Callable, repeats: int, count: int
) -> list[dict]:
    """Checks every model, times each once a round, and returns the rows of a report.

    Args:
        contenders: the first is what the others are compared with.
        collect: maps a model to tensors, for the check. measure: maps a key to seconds.
        count: symbols or tokens of a pass.

    Raises:
        UsageError: a model gives wrong results.
    """
    errors = check(contenders, collect)
    seconds = interleave(list(errors), repeats, measure)
    baseline = contenders[0].key
    rows = []
    for contender in contenders:
        key, own = contender.key, seconds[contender.key]
        reference = seconds.get((key[0], "reference"))
        beside = reference is not None and key[1] != "reference"
        row = {
            "model": key[0],
            "backend": key[1],
            "type": contender.dtype,
            "parameters": count_parameters(contender.module),
            "ms": 1e3 * float(np.median(own)),
            "tokens/s": count / float(np.median(own)),
            # The baseline's seconds divided by the model's are the model's speed divided by the baseline's.
            f"speed / {baseline[0]}": ratio(seconds[baseline], own),
            "speed / reference": float(np.median(reference / own)) if beside else None,
            "error": errors[key],
            ROUNDS: own.tolist(),
        }
        rows.append(row)
    return rows
