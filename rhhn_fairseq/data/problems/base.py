"""The interface of a problem: sequences of numbers to read, and the expected answers.

Shapes: N examples, T steps, C numbers a step.
"""

import numpy as np

Codes = tuple[np.ndarray, ...]
"""Examples in a compact form, arrays [N, ...] of equal N."""


class Problem:
    """A supervised problem on sequences of one length; subclasses set the attributes.

    Attributes:
        name: its name in messages.
        steps: T, how many steps an example has.
        input_size: C, how many numbers are read at a step.
        classes: how many answers there are to choose from; 0 if the answer is a number.
        per_step: whether there is an answer at every step, or one after the last.
        counted: bool [T], true at the steps whose answers count for the accuracy; None for all. The loss is
            over all steps.
    """

    name: str
    steps: int
    input_size: int
    classes: int
    per_step: bool
    counted: np.ndarray | None = None

    @property
    def output_size(self) -> int:
        """Width of a network's answer: a score for each class, or one number."""
        return self.classes or 1

    def render(self, codes: Codes) -> tuple[np.ndarray, np.ndarray]:
        """Renders examples as a network reads them.

        Returns:
            inputs, float32 [N, T, C]; and targets: classes, int64 [N, T] or [N], or numbers, float32 [N].
        """
        raise NotImplementedError(f"{type(self).__name__} has no render")


class GeneratedProblem(Problem):
    """A problem whose examples are drawn at random, in any number."""

    def draw(self, rng: np.random.Generator, N: int) -> Codes:
        """Draws N examples."""
        raise NotImplementedError(f"{type(self).__name__} has no draw")
