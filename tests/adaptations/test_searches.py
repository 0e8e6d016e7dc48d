"""fairseq's own searches."""

import torch
from fairseq.data import Dictionary
from fairseq.search import DiverseBeamSearch

import rhhn_fairseq.plugin  # noqa: F401  (adapts the search)


def search(numbers) -> list:
    """Two steps with two groups; the first sentence ends after one. What is chosen, and with which scores."""
    diverse, draw = DiverseBeamSearch(Dictionary(), 2, 0.5), torch.Generator().manual_seed(1)
    numbers, chosen, scores = torch.tensor(numbers), [], torch.zeros(3, 2, 0)
    for step, rest in enumerate((slice(0, 3), slice(1, 3), slice(2, 3))):
        log_p = torch.randn(3, 2, 9, generator=draw)[rest].log_softmax(-1)
        found = diverse.step(step, log_p, scores[rest][:, :, :step], None, numbers[rest])
        chosen += [values.tolist() for values in found]
        scores = torch.cat([scores, torch.zeros(3, 2, 1)], dim=2)
    return chosen


def test_diverse_groups_of_any_batch():
    """number_diverse_groups_by_batch"""
    assert search([7, 5, 11]) == search([0, 1, 2])
