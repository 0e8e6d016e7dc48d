"""Makes batches of a problem's examples: fresh ones, or a fixed set in a random order or its own.

Batches are numbered across epochs: batch ``b`` of epoch ``e`` is number ``e * len + b``. Its content
depends on the seed and these two numbers alone, so a run resumed from a checkpoint reads what it would
have read, and W workers read what one worker reads in W batches.

Shapes: B examples in a batch, N in a set, T steps, C numbers a step.
"""

from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.data.problems.base import Codes, GeneratedProblem, Problem

# The uses of random numbers. Seeds begin with one of these, so that no two uses share any numbers.
FRESH, TRAINING_SET, ORDER, VALID_SET, TEST_SET = range(5)


@dataclass(frozen=True)
class ProblemBatch:
    """One batch.

    Attributes:
        inputs: float32 [B, T, C]. targets: as ``Problem.render`` returns them. number: within its epoch.
    """

    inputs: np.ndarray
    targets: np.ndarray
    number: int


class FreshBatches:
    """Batches of examples that were never seen before, drawn from (seed, e, b).

    Args:
        problem: draws them. B: examples in a batch. count: batches in an epoch. seed: of the draws.
    """

    def __init__(self, problem: GeneratedProblem, B: int, count: int, seed: int):
        self.problem, self.B, self.count, self.seed = problem, B, count, seed

    def __len__(self):
        return self.count

    def batch(self, i: int) -> ProblemBatch:
        """Batch ``i % len(self)`` of epoch ``i // len(self)``."""
        epoch, b = divmod(i, self.count)
        rng = np.random.default_rng([FRESH, self.seed, epoch, b])
        return ProblemBatch(*self.problem.render(self.problem.draw(rng, self.B)), b)


class StoredBatches:
    """Batches of a fixed set of examples, each once per epoch; the last batch may be smaller.

    Args:
        problem: renders them. codes: the examples. B: examples in a batch.
        seed: the order of epoch e is drawn from (seed, e); None keeps their own order.
    """

    def __init__(self, problem: Problem, codes: Codes, B: int, seed: int | None = None):
        self.problem, self.codes, self.B, self.seed = problem, codes, B, seed

    def __len__(self):
        return -(-len(self.codes[0]) // self.B)

    def batch(self, i: int) -> ProblemBatch:
        """Batch ``i % len(self)`` of epoch ``i // len(self)``."""
        epoch, b = divmod(i, len(self))
        rows = slice(b * self.B, (b + 1) * self.B)
        if self.seed is not None:
            # Ordering 50,000 examples takes a millisecond, a batch of long sequences hundreds of them.
            rng = np.random.default_rng([ORDER, self.seed, epoch])
            rows = rng.permutation(len(self.codes[0]))[rows]
        return ProblemBatch(*self.problem.render(tuple(codes[rows] for codes in self.codes)), b)


def training_set(problem: GeneratedProblem, N: int, seed: int) -> Codes:
    """Draws a fixed set of N training examples from the run's seed."""
    return problem.draw(np.random.default_rng([TRAINING_SET, seed]), N)


def evaluation_set(problem: GeneratedProblem, split: str, N: int) -> Codes:
    """Draws N examples of ``valid`` or ``test``: the same in every run, independent of its seed."""
    return problem.draw(np.random.default_rng([{"valid": VALID_SET, "test": TEST_SET}[split]]), N)
