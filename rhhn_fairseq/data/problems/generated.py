"""What a problem is, and those whose examples are drawn at random: copying, adding, temporal exclusive or.

Shapes: N examples, T steps, C numbers a step.
"""

import numpy as np

from rhhn_fairseq.errors import UsageError

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


COPYING_INPUTS = ("scalar", "one_hot")


class Copying(GeneratedProblem):
    """The copying problem: read ten symbols and repeat them after a delay.

    An example has ``delay`` + 20 steps. Inputs: ten symbols drawn from eight, delay - 1 blanks, a delimiter,
    ten blanks. Answers: delay + 10 blanks, then the ten symbols. Only the last ten answers count for the
    accuracy; guessing gets one eighth of them right.

    Kanuparthi et al. 2019 (arXiv 1810.03023) and their code, after Hochreiter and Schmidhuber 1997 and
    Arjovsky et al. 2016. As in the code, the blank is 0, symbols are 1 to 8, the delimiter is 9, the inputs
    are these numbers (``scalar``), and there are 9 classes, as the delimiter is never an answer. With
    ``one_hot`` the inputs are ten units of which one is 1.

    Args:
        delay: T of the papers. inputs: ``scalar`` or ``one_hot``.

    Raises:
        UsageError: the delay is below 1, or the form of the inputs is unknown.
    """

    name = "copying"
    classes = 9
    per_step = True
    symbols = 10
    delimiter = 9

    def __init__(self, delay: int, inputs: str = "scalar"):
        if delay < 1:
            raise UsageError(f"--length {delay} is too small for copying, the smallest is 1")
        if inputs not in COPYING_INPUTS:
            raise UsageError(f"--copying-input {inputs} is unknown, choose from {', '.join(COPYING_INPUTS)}")
        self.delay, self.one_hot = delay, inputs == "one_hot"
        self.steps = delay + 2 * self.symbols
        self.input_size = self.delimiter + 1 if self.one_hot else 1
        self.counted = np.arange(self.steps) >= delay + self.symbols

    def draw(self, rng: np.random.Generator, N: int) -> Codes:
        """Draws the ten symbols of N examples, uint8 [N, 10]."""
        return (rng.integers(1, self.classes, (N, self.symbols), dtype=np.uint8),)

    def render(self, codes: Codes) -> tuple[np.ndarray, np.ndarray]:
        """See ``Problem.render``; targets [N, T]."""
        (symbols,) = codes
        read = np.zeros((len(symbols), self.steps), dtype=np.int64)
        read[:, : self.symbols] = symbols
        # After the symbols and delay - 1 blanks.
        read[:, self.symbols + self.delay - 1] = self.delimiter
        targets = np.zeros_like(read)
        targets[:, self.counted] = symbols
        if self.one_hot:
            return np.eye(self.input_size, dtype=np.float32)[read], targets
        return read[..., None].astype(np.float32), targets


class Adding(GeneratedProblem):
    """The adding problem: give the sum of the two marked numbers of a sequence after its end.

    Inputs at a step: a number drawn from [0, 1), and a mark, which is 1 at one step of the first half and one
    of the second, else 0. Always answering 1 has a mean squared error of 1/6, the variance of the sum.

    Hochreiter and Schmidhuber 1997, experiment 4, in the form of Le et al. 2015 (arXiv 1504.00941) and
    Arjovsky et al. 2016 (arXiv 1511.06464).

    Args:
        steps: T, at least 2.

    Raises:
        UsageError: the sequence has fewer than two steps.
    """

    name = "adding"
    input_size = 2
    classes = 0
    per_step = False

    def __init__(self, steps: int):
        if steps < 2:
            raise UsageError(f"--length {steps} is too small for adding, the smallest is 2")
        self.steps = steps

    def draw(self, rng: np.random.Generator, N: int) -> Codes:
        """Draws numbers, float32 [N, T], and the marked steps, int64 [N, 2]."""
        half = self.steps // 2
        first, second = rng.integers(0, half, N), rng.integers(half, self.steps, N)
        return rng.random((N, self.steps), dtype=np.float32), np.stack([first, second], axis=1)

    def render(self, codes: Codes) -> tuple[np.ndarray, np.ndarray]:
        """See ``Problem.render``; targets [N]."""
        numbers, marked = codes
        marks = np.zeros_like(numbers)
        np.put_along_axis(marks, marked, 1.0, axis=1)
        targets = np.take_along_axis(numbers, marked, axis=1).sum(axis=1)
        return np.stack([numbers, marks], axis=-1), targets


class TemporalXor(GeneratedProblem):
    """The temporal XOR problem: predict the next bit, where every third is the XOR of the two before it.

    Two thirds of the answers cannot be predicted. Only the others count for the accuracy; guessing gets half
    of them right. The loss is over all steps, as in Elman 1990 (Finding structure in time), who read one
    sequence of 3,000 bits where this draws many short ones, and did not tell the network where one begins.

    Args:
        bits: bits of a sequence; a network reads all but the last.

    Raises:
        UsageError: there are too few bits for one to be predictable.
    """

    name = "xor"
    input_size = 1
    classes = 2
    per_step = True

    def __init__(self, bits: int):
        if bits < 3:
            raise UsageError(f"--length {bits} is too small for xor, the smallest is 3")
        self.steps = bits - 1
        self.counted = np.arange(1, bits) % 3 == 2

    def draw(self, rng: np.random.Generator, N: int) -> Codes:
        """Draws bits, uint8 [N, bits]."""
        bits = rng.integers(0, 2, (N, self.steps + 1), dtype=np.uint8)
        third = bits[:, 2::3]
        third[:] = bits[:, 0::3][:, : third.shape[1]] ^ bits[:, 1::3][:, : third.shape[1]]
        return (bits,)

    def render(self, codes: Codes) -> tuple[np.ndarray, np.ndarray]:
        """See ``Problem.render``; targets [N, T]."""
        (bits,) = codes
        return bits[:, :-1, None].astype(np.float32), bits[:, 1:].astype(np.int64)
