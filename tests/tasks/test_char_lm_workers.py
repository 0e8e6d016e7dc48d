"""The groups of lanes that belong to each worker: in training, in checkpoints, and where all are gathered."""

from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_char_lm import build_model, build_task, iterator, write_corpus

from rhhn_fairseq.criterions.char_cross_entropy import CharCrossEntropy
from rhhn_fairseq.tasks.carry import Carry, gather_states


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_every_worker_has_its_groups(corpus):
    """Of two workers and two batches an update, worker r has the groups r and 2 + r."""
    task = build_task(corpus, tokens_per_sample=20, update_freq=[2])
    first, second, *_ = iterator(task, B=2, workers=2, rank=1).next_epoch_itr()
    assert (first["group"], second["group"]) == (1, 3)
    optimizer = SimpleNamespace(backward=lambda loss: loss.backward())
    for sample in (first, second):
        task.train_step(sample, build_model(task), CharCrossEntropy(task), optimizer, 0)
    assert [carry.chunk for carry in task.carries] == [0, 0]
    states = [[torch.tensor([float(group)])] for group in range(4)]
    saved = {"reverse": False, "batching": "lanes", "layout": task.layout, "chunk": 3, "states": states}
    task.set_checkpoint_dict(saved)
    assert [carry.after[0].item() for carry in task.carries] == [1.0, 3.0]


def test_states_are_gathered_in_the_order_of_the_groups(monkeypatch):
    def all_gather(copies, tensor):
        for rank, copy in enumerate(copies):
            copy.copy_(tensor + 10 * rank)

    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    carries = [Carry(0, (torch.tensor([number]),)) for number in (0.0, 1.0)]
    assert [state[0].item() for state in gather_states(carries, 2)] == [0, 10, 1, 11]
