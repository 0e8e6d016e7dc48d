"""fairseq under torchrun, and in one process as a control."""

import argparse
import re

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.models.lstm_lm import LSTMLanguageModel
from helpers.cli import USER_DIR, fairseq_train, hydra_arguments, json_log, lstm, model_of, run_module

from rhhn_fairseq import plugin as compat
from rhhn_fairseq.compat import distribute
from rhhn_fairseq.errors import UsageError

compat.apply()


def joined(cfg):
    distribute.join(cfg)
    training = cfg.distributed_training
    assert training.distributed_no_spawn
    return (
        training.distributed_world_size,
        training.distributed_rank,
        training.device_id,
        training.distributed_backend,
        training.distributed_init_method,
    )


def test_join_on_the_cpu(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distribute.launched_by_torchrun(worker.distributed_training)
    assert joined(worker) == (4, 3, 0, "gloo", "env://")


def test_join_on_gpus(worker, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert joined(worker) == (4, 3, 1, "nccl", "env://")


def test_join_a_single_worker(worker, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    worker.distributed_training.distributed_world_size = 8
    assert joined(worker)[:3] == (1, 0, 0)
    assert worker.distributed_training.distributed_init_method is None


def test_what_is_not_torchruns_is_left_to_fairseq(worker, monkeypatch):
    training = worker.distributed_training
    for name, value in (("tpu", True), ("distributed_init_method", "tcp://localhost:1")):
        before, training[name] = training[name], value
        assert not distribute.launched_by_torchrun(training)
        training[name] = before
    assert distribute.launched_by_torchrun(training)
    monkeypatch.delenv("LOCAL_RANK")
    assert not distribute.launched_by_torchrun(training)


def test_reports_on_a_share_are_refused(worker, monkeypatch):
    from fairseq_cli import eval_lm

    with pytest.raises(UsageError, match="run it without torchrun"):
        distributed_utils.call_main(worker, eval_lm.main)


def test_cpu_option_keeps_off_the_gpu(worker, monkeypatch):
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []
    for cpu in (True, False):
        worker.common.cpu = cpu
        distributed_utils.call_main(worker, lambda cfg: seen.append(torch.cuda.is_available()))
    assert seen == [False, True]
    assert torch.cuda.is_available()


def test_bf16_needs_no_tpu(worker, monkeypatch):
    """train_bf16_without_tpu; fairseq's command line sets the flag for every --bf16."""
    monkeypatch.delenv("RANK")
    worker.common.bf16 = worker.common.tpu = worker.distributed_training.tpu = True
    distributed_utils.call_main(worker, lambda cfg: None)
    assert worker.common.tpu is False and worker.distributed_training.tpu is False


@pytest.mark.slow
def test_old_style_checkpoint_of_a_dataclass_less_model(tiny_corpus, tmp_path):
    """lstm_lm is configured by a Namespace; it is resumed, evaluated, validated."""
    fairseq_train(lstm(tiny_corpus, tmp_path, "--max-update", 2))
    path = tmp_path / "checkpoint_last.pt"
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    assert unsafe == []  # Namespace is allowed in this process; nothing else is in the file.
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert isinstance(state["cfg"]["model"], argparse.Namespace)
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert isinstance(model, LSTMLanguageModel)
    resumed = fairseq_train(lstm(tiny_corpus, tmp_path, "--max-update", 3))
    steps = [r for r in json_log(resumed.stdout) if r["tag"] == "train_inner"]
    assert [step["num_updates"] for step in steps] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pytorch_ddp", "legacy_ddp"])
def test_two_workers_equal_update_freq_two(tiny_corpus, tmp_path, backend):
    """wrap_cpu_modules; 13 batches, so one worker ends on a dummy batch.

    Differences of 1e-7 come from the order of sums; Adam's division can magnify them.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    options = ["--max-epoch", 2, "--ddp-backend", backend, "--clip-norm", 1]
    single = fairseq_train(lstm(tiny_corpus, one, *options, "--update-freq", 2))
    double = fairseq_train(lstm(tiny_corpus, two, *options), workers=2, torchrun=True)
    compared = ("epoch", "update", "loss", "num_updates", "gnorm", "wpb", "valid_loss", "train_loss")
    records = [
        [{key: record[key] for key in compared if key in record} for record in json_log(run.stdout)]
        for run in (single, double)
    ]
    assert len(records[0]) == 2 * (7 + 2)
    assert records[0] == records[1]
    ours, theirs = model_of(one), model_of(two)
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_workers_resume_in_mid_epoch(tiny_corpus, tmp_path):
    """broadcast_object: rank 0 reads the checkpoint and sends it to rank 1."""
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    options = ["--max-update", 9, "--save-interval-updates", 4]
    fairseq_train(lstm(tiny_corpus, whole, *options), workers=2, torchrun=True)
    restore = ["--restore-file", whole / "checkpoint_1_4.pt"]
    resumed = fairseq_train(lstm(tiny_corpus, rest, *options, *restore), workers=2, torchrun=True)
    steps = [r["num_updates"] for r in json_log(resumed.stdout) if r["tag"] == "train_inner"]
    assert steps == [5, 6, 7, 8, 9]
    expected, found = model_of(whole), model_of(rest)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_hydra_joins_torchrun(tiny_corpus, tmp_path):
    """join_late: the same as one process with an update frequency of two."""
    one, two = tmp_path / "one", tmp_path / "two"
    run_module(
        "fairseq_cli.hydra_train",
        hydra_arguments(tiny_corpus, one, "optimization.max_update=5", "optimization.update_freq=[2]"),
        cwd=tmp_path,
    )
    double = run_module(
        "fairseq_cli.hydra_train",
        hydra_arguments(tiny_corpus, two, "optimization.max_update=5"),
        workers=2,
        cwd=tmp_path,
    )
    steps = [r["num_updates"] for r in json_log(double.stdout) if r["tag"] == "train_inner"]
    assert steps == [1, 2, 3, 4, 5]
    ours, theirs = model_of(one), model_of(two)
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_validation_gathers_on_the_cpu(tiny_corpus, tmp_path):
    """all_gather_list: fairseq-validate with two workers gives the loss of one."""
    fairseq_train(lstm(tiny_corpus, tmp_path, "--max-update", 2))
    arguments = [tiny_corpus, "--task", "language_modeling", "--max-tokens", 48]
    arguments += ["--tokens-per-sample", 12, "--path", tmp_path / "checkpoint_last.pt"]
    arguments += ["--log-format", "json", "--user-dir", USER_DIR]
    losses = []
    for workers in (None, 2):
        result = run_module("fairseq_cli.validate", arguments, workers=workers)
        losses.append([r["valid_loss"] for r in json_log(result.stdout) if "valid_loss" in r])
    assert losses[0] == losses[1][:1] and losses[0]


@pytest.mark.slow
def test_evaluation_and_tensorboard_in_one_process(tiny_corpus, tmp_path):
    """fairseq-eval-lm works as before, and --tensorboard-logdir needs no tensorboardX."""
    events = tmp_path / "events"
    options = ["--max-update", 2, "--tensorboard-logdir", events]
    trained = fairseq_train(lstm(tiny_corpus, tmp_path, *options))
    assert trained.stderr == ""  # KNOWN_WARNINGS
    assert list((events / "train_inner").glob("events.out.tfevents.*"))
    arguments = [tiny_corpus, "--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "valid"]
    arguments += ["--sample-break-mode", "eos", "--user-dir", USER_DIR]
    result = run_module("fairseq_cli.eval_lm", arguments)
    assert re.search(r"Evaluated \d+ tokens", result.stdout + result.stderr)


def test_an_empty_share_of_the_validation_counts_nothing():
    """valid_step: without it the criterion is called on a batch that holds nothing."""
    from fairseq.tasks import FairseqTask

    from rhhn_fairseq.tasks.gnmt_translation import GNMTTranslationTask

    def criterion(model, sample):
        raise AssertionError("called on an empty batch")

    assert FairseqTask.valid_step(None, {}, None, criterion) == (0.0, 0, {})
    # Its BLEU needs a search.
    assert GNMTTranslationTask.valid_step(None, {}, None, criterion) == (0.0, 0, {})
