"""Rounds of a benchmark: the order of the contenders, and what is timed."""

import torch
from torch import nn

from rhhn_fairseq.bench import timing
from rhhn_fairseq.bench.timing import interleave, time_pass


def test_contenders_take_turns_and_the_first_round_does_not_count():
    order = []

    def measure(name):
        order.append(name)
        return len(order), 10 * len(order)

    results = interleave(["a", "b", "c"], 2, measure)
    assert order == ["a", "b", "c"] * 3
    assert results["a"].tolist() == [[4, 40], [7, 70]]
    assert results["c"].tolist() == [[6, 60], [9, 90]]


def test_freed_memory_is_kept_before_the_first_pass(monkeypatch):
    """As in training: fresh memory would slow the contender that happens to run first."""
    calls = []
    monkeypatch.setattr(timing, "keep_freed_memory", lambda: calls.append("kept"))
    interleave(["a"], 1, lambda name: calls.append(name) or 0.0)
    assert calls == ["kept", "a", "a"]


def test_forward_and_backward_to_the_input_are_timed(monkeypatch):
    class Doubling(nn.Module):
        def forward(self, x):
            self.x = x
            return 2 * x, None

    clock = iter([1.0, 4.0, 11.0])
    monkeypatch.setattr(timing, "now", lambda device: next(clock))
    layer, x, gradient = Doubling(), torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    assert time_pass(layer, x, gradient) == (3.0, 7.0)
    assert torch.equal(layer.x.grad, 2 * gradient)
    assert not x.requires_grad


def test_passes_begin_without_gradients():
    layer = torch.nn.LSTM(2, 3)
    gradients = []
    for _ in range(2):
        time_pass(layer, torch.ones(4, 1, 2), torch.ones(4, 1, 3))
        gradients.append(layer.weight_hh_l0.grad.clone())
    assert torch.equal(*gradients)
