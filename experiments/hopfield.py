"""Hopfield's memory (1982): a symmetric recurrent network whose fixed points are stored patterns.

With patterns xi of N values +1 and -1::

    W = (1 / N) sum over patterns of xi xi^T,   with a zero diagonal
    s_i <- sign(sum over j of W_ij s_j),        one unit after another, in random order

Each change lowers the energy -1/2 s^T W s, so the state converges. Up to about 0.138 N random patterns are
recalled (Amit, Gutfreund and Sompolinsky 1985). The weights are constant during recall; a hypernetwork
changes its weights at every step.
"""

import numpy as np

from rhhn_fairseq.errors import UsageError


class Hopfield:
    """A memory that stores patterns.

    Args:
        patterns: +1 and -1, [P, N].

    Attributes:
        weight: [N, N], float64.

    Raises:
        UsageError: the patterns are not an array [P, N], have values other than +1 and -1, or are empty.
    """

    def __init__(self, patterns: np.ndarray):
        patterns = np.asarray(patterns, dtype=np.float64)
        if patterns.ndim != 2 or not patterns.size:
            raise UsageError(f"patterns have shape {patterns.shape}, expected [P, N]")
        if not (np.abs(patterns) == 1).all():
            raise UsageError("patterns have other values than +1 and -1")
        # N W is in whole numbers, in which an input of zero is exact.
        self._scaled_weight = patterns.T @ patterns
        np.fill_diagonal(self._scaled_weight, 0.0)
        self.weight = self._scaled_weight / patterns.shape[1]

    def energy(self, state: np.ndarray) -> float:
        """Returns the energy -1/2 s^T W s of a state [N]."""
        return float(-0.5 * state @ self.weight @ state)

    def recall(self, state: np.ndarray, generator: np.random.Generator, sweeps: int = 100) -> np.ndarray:
        """Updates a state until it is a fixed point, or for ``sweeps`` sweeps, and returns it.

        Args:
            state: +1 and -1, [N]. generator: draws the order of the units.
            sweeps: the most updates of each unit.

        Returns:
            +1 and -1, [N]. A unit whose input is zero keeps its value.
        """
        state = np.array(state, dtype=np.float64)
        field = self._scaled_weight @ state
        for _ in range(sweeps):
            changed = False
            for unit in generator.permutation(len(state)):
                if field[unit] * state[unit] < 0:
                    state[unit] = -state[unit]
                    field += 2 * state[unit] * self._scaled_weight[:, unit]
                    changed = True
            if not changed:
                break
        return state


def flip(pattern: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Returns a pattern [N] with this share of its values, rounded to a whole number, flipped."""
    damaged = np.array(pattern, dtype=np.float64)
    places = generator.choice(len(damaged), round(share * len(damaged)), replace=False)
    damaged[places] *= -1
    return damaged


def capacity_curve(units: int, loads, trials: int, seed: int) -> np.ndarray:
    """Measures how well random patterns are stored as their number grows.

    Args:
        units: N. loads: numbers of patterns as shares of N. trials: networks for each load.

    Returns:
        for each load the mean overlap (s . xi) / N between a pattern and the fixed point that the memory
        reaches from it, [len(loads)]; 1 if the pattern is stored.
    """
    generator, overlaps = np.random.default_rng(seed), []
    for load in loads:
        total = 0.0
        for _ in range(trials):
            patterns = generator.choice([-1.0, 1.0], size=(max(1, round(load * units)), units))
            total += patterns[0] @ Hopfield(patterns).recall(patterns[0], generator) / units
        overlaps.append(total / trials)
    return np.array(overlaps)
