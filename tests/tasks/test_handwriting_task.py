"""What the handwriting task shuffles and draws."""

from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_handwriting import build, prepare_words

from rhhn_fairseq.criterions.mixture_density import MixtureDensity
from rhhn_fairseq.tasks.handwriting import HandwritingTask, HandwritingTaskConfig


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return prepare_words(tmp_path_factory.mktemp("words") / "data")


def _task(data, seed=1):
    return HandwritingTask.setup_task(HandwritingTaskConfig(data=str(data), train_subset="train", seed=seed))


def test_only_training_lines_are_shuffled(words):
    task = _task(words)
    for split in ("train", "valid"):
        task.load_dataset(split)
        assert task.datasets[split].shuffle == (split == "train")


def test_the_seed_decides_what_a_batch_draws(words, monkeypatch):
    draws = []

    def rescaled(sample):
        draws.append(torch.rand(1).item())
        return sample

    for seed in (1, 1, 2):
        task = _task(words, seed)
        task.load_dataset("train")
        dataset = task.datasets["train"]
        monkeypatch.setattr(task, "rescaled", rescaled)
        optimizer = SimpleNamespace(backward=lambda loss: None)
        sample = dataset.collater([dataset[0], dataset[1]])
        task.train_step(sample, build().double(), MixtureDensity(None, "point"), optimizer, 1)
    assert draws[0] == draws[1] != draws[2]
