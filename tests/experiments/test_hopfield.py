"""Hopfield's memory: recall, energy and capacity."""

import numpy as np
import pytest

from experiments.hopfield import Hopfield, capacity_curve, flip
from rhhn_fairseq.errors import UsageError


def random_patterns(count, units, seed):
    return np.random.default_rng(seed).choice([-1.0, 1.0], size=(count, units))


@pytest.mark.parametrize("seed", range(5))
def test_patterns_are_recalled_from_a_fifth_of_flipped_bits(seed):
    patterns = random_patterns(10, 400, seed)
    memory, generator = Hopfield(patterns), np.random.default_rng(seed)
    for pattern in patterns:
        damaged = flip(pattern, 0.2, generator)
        assert (damaged != pattern).sum() == 80
        np.testing.assert_array_equal(memory.recall(damaged, generator), pattern)


def test_weight_by_hand():
    memory = Hopfield(np.array([[1, -1, 1, 1], [1, 1, -1, 1]]))
    expected = np.array([[0, 0, 0, 2], [0, 0, -2, 0], [0, -2, 0, 0], [2, 0, 0, 0]]) / 4
    np.testing.assert_array_equal(memory.weight, expected)
    assert memory.energy(np.array([1.0, -1.0, 1.0, 1.0])) == -1.0


def test_recall_lowers_the_energy_and_ends_in_a_fixed_point():
    memory, generator = Hopfield(random_patterns(30, 100, 1)), np.random.default_rng(2)
    for start in random_patterns(20, 100, 3):
        end = memory.recall(start, generator)
        assert memory.energy(end) <= memory.energy(start)
        # In whole numbers, so that a field of zero is exact.
        field = (memory.weight * 100).round() @ end
        assert (field * end >= 0).all()


def test_capacity_breaks_down_between_a_tenth_and_a_fifth():
    kept, lost = capacity_curve(400, (0.10, 0.20), trials=6, seed=1)
    # 0.138 N is the limit for large N. Over 30 seeds: 0.993 to 1.000 at 0.10 and 0.40 to 0.78 at 0.20.
    assert kept > 0.95
    assert lost < 0.9


@pytest.mark.parametrize("patterns", [np.zeros((2, 3)), np.ones(4), np.ones((0, 4))])
def test_other_patterns_are_refused(patterns):
    with pytest.raises(UsageError):
        Hopfield(patterns)
