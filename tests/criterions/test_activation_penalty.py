"""Activation regularisation against sums written out, and what a training logs of it."""

import math

import numpy as np
import pytest
import torch
from fairseq.logging import metrics

from rhhn_fairseq.criterions.char_cross_entropy import CharCrossEntropy, activation_penalty

T, B, H, D = 4, 2, 3, 6


class Indices:
    pad, unk = staticmethod(lambda: 1), staticmethod(lambda: 3)


class Task:
    target_dictionary = Indices()


class Model(torch.nn.Module):
    """Fixed outputs, so that only the criterion is tested."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits, self.y, self.dropped = (
            torch.randn(shape, generator=generator) for shape in ((B, T, D), (T, B, H), (T, B, H))
        )

    def forward(self, src_tokens, mask=None):
        return self.logits, {"outputs": self.y, "dropped_outputs": self.dropped}


def _sample():
    target = torch.full((B, T), 4)
    return {"net_input": {"src_tokens": target}, "target": target, "ntokens": B * T, "nsentences": B}


def _written_out(model, alpha, beta, lengths=(T,) * B):
    y, dropped = model.y.double().numpy(), model.dropped.double().numpy()
    places = [(t, b, j) for b in range(B) for t in range(lengths[b]) for j in range(H)]
    changes = [(y[t, b, j] - y[t - 1, b, j]) ** 2 for t, b, j in places if t]
    return alpha * np.mean([dropped[place] ** 2 for place in places]) + beta * np.mean(changes)


def test_the_penalty_is_added_a_symbol_in_training_and_logged_apart():
    model = Model().train()
    plain, count, logged = CharCrossEntropy(Task())(model, _sample())
    assert "penalty" not in logged
    loss, _, logged = CharCrossEntropy(Task(), 2.0, 0.5)(model, _sample())
    expected = _written_out(model, 2.0, 0.5)
    assert float(loss - plain) == pytest.approx(count * expected, rel=1e-6)
    assert float(logged["loss"]) == float(plain)
    with metrics.aggregate() as totals:
        CharCrossEntropy.reduce_metrics([logged, logged])
    values = totals.get_smoothed_values()
    assert values["penalty"] == pytest.approx(expected, abs=1e-4)
    assert values["bpc"] == pytest.approx(float(plain) / count / math.log(2), abs=1e-4)
    right = (model.logits.argmax(dim=-1) == 4).float().mean().item()
    assert 0 < right < 1 and values["accuracy"] == pytest.approx(100 * right, abs=0.01)
    loss, _, logged = CharCrossEntropy(Task(), 2.0, 0.5)(model.eval(), _sample())
    assert float(loss) == float(plain) and "penalty" not in logged


def test_padding_is_no_part_of_the_means():
    model, sample = Model().train(), _sample()
    sample["net_input"]["mask"] = torch.arange(T) < torch.tensor([[T], [T - 2]])
    sample["ntokens"] = 2 * T - 2
    plain, count, _ = CharCrossEntropy(Task())(model, sample)
    loss, _, _ = CharCrossEntropy(Task(), 2.0, 0.5)(model, sample)
    expected = _written_out(model, 2.0, 0.5, (T, T - 2))
    assert float(loss - plain) == pytest.approx(count * expected, rel=1e-6)
    one = torch.ones(2, B, H)
    mask_TB = torch.tensor([[True] * B, [False] * B])
    assert float(activation_penalty(one, one, 0.0, 1.0, mask_TB)) == 0.0


def test_one_step_has_no_change():
    one = torch.ones(1, B, H)
    assert float(activation_penalty(one, one, 0.0, 1.0)) == 0.0
