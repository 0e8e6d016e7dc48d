"""A training that learns from an ensemble: its loss against the formula, and the predictions it reads."""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_translation
from helpers.in_process import LOG, train

from experiments import distilled

V, PAD = 7, 1


class Fixed(torch.nn.Module):
    """A model that returns logits [B, T, V], in training twice as large; it counts its calls."""

    def __init__(self, seed, shape):
        super().__init__()
        self.logits = torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        self.calls = 0

    def forward(self, **inputs):
        self.calls += 1
        return self.logits * (1 + self.training)

    def get_normalized_probs(self, output, log_probs, sample=None):
        return output.log_softmax(-1) if log_probs else output.softmax(-1)

    def get_targets(self, sample, output):
        return sample["target"]


def test_it_learns_from_the_text_and_from_the_mean_of_the_models(tmp_path, monkeypatch):
    monkeypatch.setattr(distilled, "KEPT", 3)
    target = torch.tensor([[2, 5, PAD], [6, 3, 4]])
    sample = {"id": torch.tensor([1, 0]), "target": target, "net_input": {}}
    models, dictionary = [Fixed(seed, (2, 3)) for seed in (1, 2)], SimpleNamespace(pad=lambda: PAD)
    task = SimpleNamespace(
        target_dictionary=dictionary,
        dataset=lambda split: [{"target": [6, 3, 4]}, {"target": [2, 5]}],
        get_batch_iterator=lambda data, max_tokens: SimpleNamespace(next_epoch_itr=lambda shuffle: [sample]),
    )
    torch.save(distilled.predictions(models, task), tmp_path / "teacher.pt")
    assert [model.calls for model in models] == [distilled.PASSES] * 2
    criterion, student = distilled.Distilled(task, False, 0.1, tmp_path / "teacher.pt", 0.4), Fixed(3, (2, 3))
    loss, nll = criterion.compute_loss(student, student.logits, sample)
    real = target != PAD
    p = sum((2 * model.logits[real]).softmax(-1) for model in models).detach()
    kept = p >= p.sort(descending=True).values[:, 2:3]
    p = torch.where(kept, p, 0.0)
    log_p = student.logits[real].log_softmax(-1)
    own = log_p.gather(1, target[real][:, None]).sum()
    rest = 0.1 / (V - 1)
    expected = (
        -0.6 * ((1 - 0.1 - rest) * own + rest * log_p.sum())
        - 0.4 * (p / p.sum(1, keepdim=True) * log_p).sum()
    )
    assert nll.item() == pytest.approx(-own.item(), rel=1e-6)
    # Probabilities are kept in float16.
    assert loss.item() == pytest.approx(expected.item(), rel=5e-4)
    with torch.no_grad():
        plain, _ = criterion.compute_loss(student, student.logits, sample)
    assert plain.item() == pytest.approx((-(1 - 0.1 - rest) * own - rest * log_p.sum()).item(), rel=1e-6)


def test_the_commands_of_its_page(tmp_path):
    (tmp_path / "corpus").mkdir()
    data = tiny_translation.prepare(tmp_path / "corpus")
    train(*tiny_translation.lstm(data, tmp_path / "first", "--max-update", 3, size=8))
    checkpoint = tmp_path / "first" / "checkpoint_last.pt"
    distilled.main([str(data), str(checkpoint), "--output", str(tmp_path / "teacher.pt")])
    kept = torch.load(tmp_path / "teacher.pt")
    torch.testing.assert_close(kept["p"].float().sum(1), torch.ones(len(kept["p"])), rtol=0, atol=2e-3)
    assert len(kept["start"]) == tiny_translation.SPLITS["train"] + 1
    given = ["--criterion", "distilled", "--teacher", tmp_path / "teacher.pt", "--max-update", 3]
    log = train(*tiny_translation.lstm(data, tmp_path / "student", *given, *LOG, size=8))
    assert len(log.losses) == 3
