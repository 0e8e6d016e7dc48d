"""Hopfield's memory (1982): a symmetric recurrent network whose fixed points are stored patterns.

With patterns xi of N values +1 and -1::

    W = (1 / N) sum over patterns of xi xi^T,   with a diagonal of zeros
    s_i <- sign(sum over j of W_ij s_j),        one unit after another, in random order

Each change lowers the energy -1/2 s^T W s, so the state settles. Random patterns are recalled up to about
0.138 N of them (Amit, Gutfreund and Sompolinsky 1985). The weights never change while the memory recalls; a
hypernetwork changes them at every step.
"""

import numpy as np

from rhhn_fairseq.errors import UsageError


class Hopfield:
    """A memory of patterns.

    Args:
        patterns: +1 and -1, [P, N].

    Attributes:
        weight: [N, N], float64.

    Raises:
        UsageError: a pattern has another value than +1 and -1, or there is none.
    """

    def __init__(self, patterns: np.ndarray):
        patterns = np.asarray(patterns, dtype=np.float64)
        if patterns.ndim != 2 or not patterns.size:
            raise UsageError(f"patterns have shape {patterns.shape}, expected [P, N]")
        if not (np.abs(patterns) == 1).all():
            raise UsageError("patterns have other values than +1 and -1")
        self.weight = patterns.T @ patterns / patterns.shape[1]
        np.fill_diagonal(self.weight, 0.0)

    def energy(self, state: np.ndarray) -> float:
        """-1/2 s^T W s of a state [N]."""
        return float(-0.5 * state @ self.weight @ state)

    def recall(self, state: np.ndarray, generator: np.random.Generator, sweeps: int = 100) -> np.ndarray:
        """The fixed point that a state settles in.

        Args:
            state: +1 and -1, [N]. generator: draws the order of the units.
            sweeps: at most so many updates of each unit.

        Returns:
            +1 and -1, [N]. A unit whose input is zero keeps its value.
        """
        state = np.array(state, dtype=np.float64)
        field = self.weight @ state
        for _ in range(sweeps):
            changed = False
            for unit in generator.permutation(len(state)):
                if field[unit] * state[unit] < 0:
                    state[unit] = -state[unit]
                    field += 2 * state[unit] * self.weight[:, unit]
                    changed = True
            if not changed:
                break
        return state


def flip(pattern: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """A pattern [N] with this share of its values, rounded, turned around."""
    damaged = np.array(pattern, dtype=np.float64)
    places = generator.choice(len(damaged), round(share * len(damaged)), replace=False)
    damaged[places] *= -1
    return damaged


def capacity_curve(units: int, loads, trials: int, seed: int) -> np.ndarray:
    """How well random patterns are kept as their number grows.

    Args:
        units: N. loads: numbers of patterns as shares of N. trials: networks for each load.

    Returns:
        for each load the mean overlap (s . xi) / N between a pattern and the fixed point that the memory
        reaches from it: 1 where it is kept, [len(loads)].
    """
    generator, overlaps = np.random.default_rng(seed), []
    for load in loads:
        total = 0.0
        for _ in range(trials):
            patterns = generator.choice([-1.0, 1.0], size=(max(1, round(load * units)), units))
            total += patterns[0] @ Hopfield(patterns).recall(patterns[0], generator) / units
        overlaps.append(total / trials)
    return np.array(overlaps)
