"""The loss of the synthetic problems: what is summed, which answers count, and what is logged."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics

from rhhn_fairseq import plugin  # noqa: F401  (registers the criterion)
from rhhn_fairseq.criterions.problem_loss import ProblemLoss


class Answers(torch.nn.Module):
    """A model whose answers are given."""

    def __init__(self, answers):
        super().__init__()
        self.answers = torch.tensor(answers)

    def forward(self):
        return self.answers


def _criterion(classes, counted=None):
    return ProblemLoss(SimpleNamespace(problem=SimpleNamespace(classes=classes, counted=counted)))


def _sample(target):
    target = torch.tensor(target)
    return {"net_input": {}, "target": target, "ntokens": target.numel(), "nsentences": len(target)}


def _figures(*logged):
    with metrics.aggregate() as meters:
        ProblemLoss.reduce_metrics(list(logged))
    return meters.get_smoothed_values()


def _logit(p):
    """Scores of two classes, of which the second has probability p."""
    return [0.0, math.log(p / (1 - p))]


def test_classes_are_scored_at_every_step_and_right_at_those_that_count():
    scores = [[_logit(0.25), _logit(0.5), _logit(0.8)], [_logit(0.9), _logit(0.4), _logit(0.7)]]
    target = [[0, 1, 1], [0, 1, 1]]
    criterion = _criterion(2, np.array([False, True, True]))
    loss, size, logged = criterion(Answers(scores), _sample(target))
    of_target = [[0.75, 0.5, 0.8], [0.1, 0.4, 0.7]]
    assert loss.item() == pytest.approx(-np.log(of_target).sum(), rel=1e-6) and size == 6
    # Of the last two steps, a tie goes to the first class and 0.4 is too little.
    assert (int(logged["correct"]), logged["counted"]) == (2, 4)
    assert _figures(logged) == {
        "loss": pytest.approx(-np.log(of_target).mean(), abs=1e-5),
        "accuracy": 50.0,
    }
    each, _, _ = criterion(Answers(scores), _sample(target), reduce=False)
    assert each.tolist() == pytest.approx(-np.log(np.ravel(of_target)), rel=1e-6)


def test_one_answer_an_example_counts_always():
    loss, size, logged = _criterion(2)(Answers([_logit(0.9), _logit(0.6), _logit(0.2)]), _sample([1, 0, 0]))
    assert loss.item() == pytest.approx(-np.log([0.9, 0.4, 0.8]).sum(), rel=1e-6) and size == 3
    assert _figures(logged)["accuracy"] == pytest.approx(200 / 3, abs=0.01)


def test_numbers_have_squared_errors_and_are_right_within_four_hundredths_of_their_range():
    answers, target = [[1.0], [0.0], [1.03], [0.5]], [1.079, 0.081, 1.0, 0.579]
    loss, size, logged = _criterion(0)(Answers(answers), _sample(target))
    errors = np.array([0.079, 0.081, 0.03, 0.079])
    assert loss.item() == pytest.approx(np.square(errors).sum(), rel=1e-4) and size == 4
    # Sums over batches of different sizes, not means of means.
    other = _criterion(0)(Answers([[2.0], [2.0]]), _sample([1.0, 2.0]))[2]
    found = _figures(logged, other)
    mean = (np.square(errors).sum() + 1) / 6
    assert found["loss"] == found["mse"] == pytest.approx(mean, abs=1e-5)
    assert found["accuracy"] == pytest.approx(100 * 4 / 6, abs=0.01)
    each, _, _ = _criterion(0)(Answers(answers), _sample(target), reduce=False)
    assert each.tolist() == pytest.approx(np.square(errors), rel=1e-3)


def test_a_worker_without_a_batch_logs_nothing():
    assert _figures() == {}
