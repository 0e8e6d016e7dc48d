"""The loss of two trainings that learn from each other, against its formula."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from fairseq.models import FairseqModel

from experiments import mutual

PAD, V = 1, 7


class Fixed(torch.nn.Module):
    """A model that returns its parameters as logits [B, T, V]."""

    get_normalized_probs = FairseqModel.get_normalized_probs_scriptable

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.nn.Parameter(torch.randn(2, 3, V, generator=generator))

    def get_targets(self, sample, net_output):
        return sample["target"]


def _losses(folder, targets, weight=0.3):
    """Returns the losses of two trainings of one update each, and their gradients."""
    task = SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD))

    def train(rank):
        criterion, model = mutual.Mutual(task, False, 0.1, weight), Fixed(rank)
        criterion.exchange = mutual.Exchange(rank, folder)
        loss, nll = criterion.compute_loss(model, model.logits, {"target": targets[rank]})
        loss.backward()
        return loss.item(), nll.item(), model.logits.grad

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(train, (0, 1)))


def test_each_learns_from_the_text_and_from_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(mutual, "LARGEST", 100)
    target = torch.tensor([[2, 5, PAD], [6, 3, 4]])
    found = _losses(tmp_path, (target, target))
    models, real = (Fixed(0), Fixed(1)), target != PAD
    cross_entropy = torch.nn.CrossEntropyLoss(reduction="sum")
    for rank, (loss, nll, gradient) in enumerate(found):
        own, other = models[rank].logits[real], models[1 - rank].logits[real].detach()
        other = other.softmax(-1).bfloat16().float()
        log_p = own.log_softmax(-1)
        assert nll == pytest.approx(cross_entropy(own, target[real]).item(), rel=1e-6)
        # fairseq shares 0.1 among the other entries, not among all.
        rest = 0.1 / (V - 1)
        text = (1 - 0.1 - rest) * cross_entropy(own, target[real]) - rest * log_p.sum()
        expected = 0.7 * text - 0.3 * (other * log_p).sum()
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        expected.backward()
        torch.testing.assert_close(gradient, models[rank].logits.grad)
        assert not gradient[~real].any()


def test_other_batches_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(mutual, "LARGEST", 100)
    with pytest.raises(RuntimeError, match="the other training reads another batch"):
        _losses(tmp_path, (torch.tensor([[2, 5, PAD], [6, 3, 4]]), torch.tensor([[2, 5, PAD], [6, 3, 2]])))


def test_each_has_its_own_seed(monkeypatch):
    drawn = []
    for rank in (0, 1, 1):
        monkeypatch.setattr(mutual, "RANK", rank)
        with mutual.OwnSeed(1):
            drawn.append(torch.rand(1).item())
    assert drawn[0] != drawn[1] == drawn[2]
