"""Where a training starts, whether it has anything to do, and how it goes on when it was stopped."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.configs import CheckpointConfig
from omegaconf import OmegaConf

from rhhn_fairseq.compat import quiet, restarts, starting, stopping
from rhhn_fairseq.errors import UsageError


def save(path: Path, updates: int) -> Path:
    torch.save({"model": {}, "optimizer_history": [{"num_updates": updates}]}, path)
    return path


def replacement(folder: Path, suffix: str = "", **options) -> str | None:
    values = {"save_dir": str(folder), "finetune_from_model": None, "continue_once": None}
    return starting.replacement(SimpleNamespace(**values | options), suffix)


@pytest.mark.parametrize("suffix", ["", "_a"])
def test_the_newest_good_checkpoint(tmp_path, suffix):
    """start_from_a_good_checkpoint: by its updates, among the names that fairseq gives."""
    last = save(tmp_path / f"checkpoint_last{suffix}.pt", 9)
    assert replacement(tmp_path, suffix) is None
    save(tmp_path / f"checkpoint2{suffix}.pt", 8)
    save(tmp_path / f"checkpoint.best_loss_2.51{suffix}.pt", 7)
    for name in ("checkpoint_mine", f"checkpoint3{suffix}_b", f"my_checkpoint4{suffix}"):
        save(tmp_path / f"{name}.pt", 99)
    last.write_bytes(b"")
    assert replacement(tmp_path, suffix) == str(tmp_path / "checkpoint2.pt")
    (tmp_path / f"checkpoint2{suffix}.pt").write_bytes(b"PK")
    assert replacement(tmp_path, suffix) == str(tmp_path / "checkpoint.best_loss_2.51.pt")


def test_of_equally_many_updates_the_youngest_file(tmp_path):
    for name, age in (("checkpoint_best.pt", 5), ("checkpoint1.pt", 9), ("checkpoint_1_4.pt", 7)):
        os.utime(save(tmp_path / name, 4), (age, age))
    assert starting.newest_good(tmp_path, "").name == "checkpoint1.pt"


@pytest.mark.parametrize("option", ["finetune_from_model", "continue_once"])
def test_another_start_that_is_asked_for(tmp_path, option):
    """The last checkpoint may then be missing beside others."""
    save(tmp_path / "checkpoint1.pt", 4)
    with pytest.raises(UsageError, match="is missing beside other checkpoints"):
        replacement(tmp_path)
    assert replacement(tmp_path, **{option: "other.pt"}) is None


def test_what_is_damaged(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    assert starting.damage(path) is None  # A file that is missing is another error.
    path.write_bytes(b"")
    assert starting.damage(path) == "is empty"
    path.write_bytes(b"text")
    assert starting.damage(path).startswith("is damaged or cut short (")
    torch.save({"weights": {}}, path)
    assert starting.damage(path) == "holds no model"
    torch.save([1], path)
    assert starting.damage(path) == "holds no model"
    torch.save({"model": {}, "call": Path.cwd}, path)
    assert starting.damage(path) is None


def test_events_go_where_they_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(UsageError, match=f"^--tensorboard-logdir {tmp_path}: cannot be written to$"):
        starting.make_event_directory(str(tmp_path))


def trainer(updates=0, rate=0.5, seconds=0, patience=-1, warmup_updates=0, **limits):
    """A training that has come so far."""
    none = {"max_epoch": 0, "max_update": 0, "stop_time_hours": 0, "stop_min_lr": -1}
    optimization = none | {"update_freq": [2, 4], "clip_norm": 0} | limits
    schedule = {"_name": "polynomial_decay", "total_num_update": 100, "end_learning_rate": 0.25}
    schedule["warmup_updates"] = warmup_updates
    cfg = {"optimization": optimization, "checkpoint": {"patience": patience}, "lr_scheduler": schedule}
    return SimpleNamespace(
        cfg=OmegaConf.create(cfg),
        get_num_updates=lambda: updates,
        get_lr=lambda: rate,
        _previous_training_time=seconds,
        batches_of_an_epoch=19,
    )


def epochs_of(batches, epoch=1):
    members = {"next_epoch_idx": epoch, "__len__": lambda self: batches}
    return type("Epochs", (), members)()


@pytest.mark.parametrize(
    "options, epoch, reason",
    [
        ({}, 1, None),
        ({"max_epoch": 2}, 2, None),
        ({"max_epoch": 2}, 3, "--max-epoch 2"),
        ({"max_update": 5, "updates": 4}, 1, None),
        ({"max_update": 5, "updates": 5}, 1, "--max-update 5"),
        ({"stop_time_hours": 1, "seconds": 3600}, 1, None),
        ({"stop_time_hours": 1, "seconds": 3601}, 1, "--stop-time-hours 1"),
        ({"patience": 2}, 1, None),
        ({"stop_min_lr": 0.4}, 1, None),
        ({"stop_min_lr": 0.5}, 1, "--stop-min-lr 0.5 and --lr 0.5"),
    ],
)
def test_whether_a_training_is_complete(options, epoch, reason):
    """end_where_complete"""
    assert restarts._why_complete(trainer(**options), epochs_of(batches=3, epoch=epoch)) == reason


@pytest.mark.parametrize("count, reason", [(1, "no batches in the training data"), (2, "--patience 2")])
def test_patience_that_is_used_up(monkeypatch, count, reason):
    monkeypatch.setattr(restarts, "_early_stop", lambda: SimpleNamespace(num_runs=count))
    assert restarts._why_complete(trainer(patience=2), epochs_of(batches=0)) == reason


GIVE = ": give --total-num-update {0}"
BEFORE = "training ends after {0} updates, before the learning rate has fallen to 0.25" + GIVE
WITHIN = "training ends after 19 updates, before the warm-up does"
BEYOND = "the learning rate is 0.25 from update 100 on, and training ends after {0}" + GIVE


@pytest.mark.parametrize(
    "limits, line",
    [
        ({}, None),
        ({"max_update": 98}, BEFORE.format(98)),
        ({"max_update": 99}, None),
        ({"max_update": 102}, None),
        ({"max_update": 103}, BEYOND.format(103)),
        # Nineteen batches are ten updates.
        ({"max_epoch": 10}, None),
        ({"max_epoch": 9, "max_update": 5000}, BEFORE.format(90)),
        ({"max_epoch": 500, "max_update": 100}, None),
        ({"max_update": 19, "warmup_updates": 20}, f"{WITHIN}: lower --warmup-updates 20"),
        ({"max_update": 100, "warmup_updates": 100}, None),
    ],
)
def test_the_end_of_a_schedule(limits, line):
    """sum_up_the_start"""
    assert quiet.describe_schedule(trainer(**limits)) == line


@pytest.mark.parametrize(
    "options, saved, said",
    [
        ({}, "s/checkpoint1.pt", "the same command goes on from s/checkpoint_last.pt"),
        (
            {"no_last_checkpoints": True},
            "s/checkpoint1.pt",
            "--restore-file s/checkpoint1.pt goes on from there",
        ),
        ({"no_last_checkpoints": True}, None, "nothing was saved (--no-last-checkpoints)"),
        (
            {"reset_lr_scheduler": True},
            "s/checkpoint1.pt",
            "without --reset-lr-scheduler, the same command goes on from s/checkpoint_last.pt",
        ),
    ],
)
def test_how_to_go_on(options, saved, said):
    """stop_with_a_checkpoint"""
    cfg = OmegaConf.structured(CheckpointConfig(**options))
    assert stopping._how_to_go_on(cfg, saved) == said
