"""The synthetic problems through fairseq's own programs, each in a process of its own."""

import re

import pytest
import torch
from helpers.cli import USER_DIR, fairseq_train, json_log, model_of, run_module

OPTIMIZER = ["--optimizer", "adam", "--lr", 0.01, "--cpu"]
COMMON = ["--task", "synthetic", "--criterion", "problem_loss", *OPTIMIZER, "--batch-size", 5]
MODEL = ["--arch", "lstm_copying", "--hidden-size", 8, "--output-dropout", 0.2]
ANNEALED = ["--h-detach", 0.9, "--h-detach-final", 0.1, "--detach-anneal-updates", 8]
BEST = ["--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"]
LOG = ["--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints"]


def _copying(save_dir, *options, **settings):
    data = ["--problem", "copying", "--length", 2, "--epoch-updates", 6, "--valid-examples", 20]
    return fairseq_train([*COMMON, *data, *MODEL, *LOG, "--save-dir", save_dir, *options], **settings)


def _values(key, *results):
    """A figure of every update, over one or more runs in turn."""
    records = [record for result in results for record in json_log(result.stdout + result.stderr)]
    return [record[key] for record in records if record["tag"] == "train_inner"]


def _valid(key, result):
    """A figure of every validation that has it."""
    records = [record for record in json_log(result.stdout + result.stderr) if record["tag"] == "valid"]
    return [record[f"valid_{key}"] for record in records if f"valid_{key}" in record]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("uninterrupted")
    return save_dir, _copying(save_dir, "--max-epoch", 2, *ANNEALED, *BEST, "--clip-norm", 0.01)


def test_figures_and_the_best_checkpoint(uninterrupted):
    save_dir, result = uninterrupted
    assert len(_values("loss", result)) == 12
    assert all(0 <= value <= 100 for value in _values("accuracy", result))
    assert set(_values("clip", result)) == {100}, "every gradient is longer than --clip-norm"
    accuracy = _valid("accuracy", result)
    assert len(accuracy) == 2 and _valid("num_updates", result) == [6, 12]
    assert _valid("best_accuracy", result) == [max(accuracy)]
    assert {path.name for path in save_dir.iterdir()} == {"checkpoint_best.pt", "checkpoint_last.pt"}


def test_a_resumed_run_reads_the_same_examples_with_the_same_probability(uninterrupted, tmp_path):
    whole_dir, whole = uninterrupted
    options = ["--max-epoch", 2, *ANNEALED, *BEST, "--clip-norm", 0.01]
    first = _copying(tmp_path, *options, "--max-update", 4)
    second = _copying(tmp_path, *options)
    assert "Loaded checkpoint" in second.stdout + second.stderr
    for key in ("loss", "accuracy", "gnorm", "h_detach"):
        assert _values(key, first, second) == _values(key, whole), key
    expected = [round(0.9 - 0.1 * min(update, 8), 4) for update in range(12)]
    assert _values("h_detach", whole) == expected
    resumed, trained = model_of(tmp_path), model_of(whole_dir)
    for key in trained:
        assert torch.equal(resumed[key], trained[key]), key


def _validate(save_dir, *options, **settings):
    checkpoint = [
        "--path",
        save_dir / "checkpoint_last.pt",
        "--user-dir",
        USER_DIR,
        "--cpu",
        "--batch-size",
        7,
    ]
    return run_module("fairseq_cli.validate", [*checkpoint, "--task", "synthetic", *options], **settings)


def test_a_model_is_evaluated_on_the_test_set_and_at_another_length(uninterrupted):
    """The delay of the evaluation may be another one, as in the paper's transfer experiment."""
    save_dir, result = uninterrupted
    found = {}
    for length, subsets in ((2, "valid,test"), (9, "test")):
        output = _validate(save_dir, "--problem", "copying", "--length", length, "--valid-subset", subsets)
        for subset, line in re.findall(r"valid on '(\w+)' subset \| (.*)", output.stdout + output.stderr):
            found[length, subset] = dict(part.split(" ") for part in line.split(" | "))
    last = _valid("accuracy", result)[-1]
    assert float(found[2, "valid"]["accuracy"]) == last
    assert float(found[9, "test"]["loss"]) != float(found[2, "test"]["loss"])


@pytest.mark.slow
def test_two_torchrun_workers_train_the_model_of_one_with_update_freq_2(tmp_path):
    options = ["--max-epoch", 2, *ANNEALED]
    one = _copying(tmp_path / "one", *options, "--update-freq", 2)
    two = _copying(tmp_path / "two", *options, workers=2)
    assert len(_values("loss", one)) == 12 and _values("h_detach", one) == _values("h_detach", two)
    differences = [abs(a - b) for a, b in zip(_values("loss", one), _values("loss", two), strict=True)]
    # The order in which two gradients are added is the backend's, and five decimals are logged.
    assert max(differences) <= 1.01e-5
    for key, expected in model_of(tmp_path / "one").items():
        torch.testing.assert_close(model_of(tmp_path / "two")[key], expected, rtol=0, atol=1e-5)
