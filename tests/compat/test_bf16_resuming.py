"""Training in bfloat16 goes on from the float32 weights, not from what is left of them in bfloat16."""

import pytest
import torch
from helpers.cli import model_of
from helpers.in_process import char_lm, train

END = ["--max-update", 16, "--save-interval-updates", 6]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("whole")
    return train(*char_lm(corpus, save_dir, *END, "--bf16")), save_dir


def resume(corpus, uninterrupted, save_dir, change=None):
    """The log of a run that goes on after 6 updates, from a checkpoint that ``change`` may have changed."""
    state = torch.load(uninterrupted[1] / "checkpoint_1_6.pt", weights_only=True)
    if change is not None:
        change(state)
    save_dir.mkdir(exist_ok=True)
    torch.save(state, save_dir / "from.pt")
    arguments = char_lm(corpus, save_dir, *END, "--bf16", "--restore-file", save_dir / "from.pt")
    return train(*arguments)


def test_resuming_in_bfloat16_is_bit_equal(corpus, uninterrupted, tmp_path):
    log = resume(corpus, uninterrupted, tmp_path)
    assert log.losses == uninterrupted[0].losses[6:]
    expected, found = model_of(uninterrupted[1]), model_of(tmp_path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    ends = [
        torch.load(place / "checkpoint_last.pt", weights_only=True) for place in (uninterrupted[1], tmp_path)
    ]
    pairs = zip(*(end["last_optimizer_state"]["master_weights"] for end in ends), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_checkpoints_without_float32_weights_still_load(corpus, uninterrupted, tmp_path):
    log = resume(
        corpus, uninterrupted, tmp_path, lambda state: state["last_optimizer_state"].pop("master_weights")
    )
    assert [record["num_updates"] for record in log.updates] == [str(update) for update in range(7, 17)]
    assert any("has no float32 weights" in message for message in log.messages)


def test_weights_that_were_changed_in_the_file_count(corpus, uninterrupted, tmp_path):
    def average(state):
        for value in state["model"].values():
            if value.is_floating_point():
                value.mul_(0.5)

    log = resume(corpus, uninterrupted, tmp_path, average)
    # Half of the weights is another model: its first loss is not the one of the model that was saved.
    assert log.losses[0] != uninterrupted[0].losses[6]
    without = resume(
        corpus,
        uninterrupted,
        tmp_path,
        lambda state: (average(state), state["last_optimizer_state"].pop("master_weights")),
    )
    assert log.losses == without.losses
