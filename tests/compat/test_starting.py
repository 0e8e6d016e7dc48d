"""Where a training starts, whether it has anything to do, and how it goes on when it was stopped."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.configs import CheckpointConfig
from omegaconf import OmegaConf

from rhhn_fairseq.compat import distribute, logs, resume, start, stopping


def save(path: Path, updates: int, starts: int = 1) -> Path:
    torch.save({"model": {}, "optimizer_history": [{"num_updates": updates}] * starts}, path)
    return path


def replacement(folder: Path, suffix: str = "", **options) -> str | None:
    values = {"save_dir": str(folder), "finetune_from_model": None, "continue_once": None}
    return start.replacement(SimpleNamespace(**values | options), suffix)


@pytest.mark.parametrize("suffix", ["", "_a"])
def test_the_newest_good_checkpoint(tmp_path, suffix):
    """By its updates, among the names that fairseq gives."""
    last = save(tmp_path / f"checkpoint_last{suffix}.pt", 9)
    assert replacement(tmp_path, suffix) is None
    save(tmp_path / f"checkpoint2{suffix}.pt", 8)
    save(tmp_path / f"checkpoint.best_loss_2.51{suffix}.pt", 7)
    for name in ("checkpoint_mine", f"checkpoint3{suffix}_b", f"my_checkpoint4{suffix}"):
        save(tmp_path / f"{name}.pt", 99)
    last.write_bytes(b"")
    assert replacement(tmp_path, suffix) == str(tmp_path / "checkpoint2.pt")
    # Its training was started again, with --reset-optimizer.
    save(tmp_path / f"checkpoint3{suffix}.pt", 3, starts=2)
    assert replacement(tmp_path, suffix) == str(tmp_path / "checkpoint3.pt")
    (tmp_path / f"checkpoint3{suffix}.pt").unlink()
    (tmp_path / f"checkpoint2{suffix}.pt").write_bytes(b"PK")
    assert replacement(tmp_path, suffix) == str(tmp_path / "checkpoint.best_loss_2.51.pt")


def test_what_is_damaged(tmp_path):
    path = tmp_path / "checkpoint_last.pt"

    def damage():
        return start.examined(path)[1]

    assert damage() is None  # A file that is missing is another error.
    path.write_bytes(b"text")
    assert damage().startswith("is damaged or cut short (")
    torch.save([1], path)
    assert damage() == "holds no model"
    torch.save({"model": {}, "call": Path.cwd}, path)
    assert damage() is None


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
    )


def epochs_of(batches, epoch=1, read=0):
    members = {"next_epoch_idx": epoch, "iterations_in_epoch": read, "__len__": lambda self: batches}
    return type("Epochs", (), members)()


@pytest.mark.parametrize(
    "options, epoch, reason",
    [
        ({"max_epoch": 2}, 2, None),
        ({"max_epoch": 2}, 3, "--max-epoch 2"),
        ({"max_update": 5, "updates": 5}, 1, "--max-update 5"),
        ({"stop_time_hours": 1, "seconds": 3601}, 1, "--stop-time-hours 1"),
        ({"stop_min_lr": 0.5}, 1, "--stop-min-lr 0.5 and --lr 0.5"),
    ],
)
def test_whether_a_training_is_complete(options, epoch, reason):
    assert resume._why_complete(trainer(**options), epochs_of(batches=3, epoch=epoch)) == reason


GIVE = ": give --total-num-update {0}"
BEFORE = "training ends after {0} updates, before the learning rate has fallen to 0.25" + GIVE
WITHIN = "training ends after 19 updates, before the warm-up does"
BEYOND = "the learning rate is 0.25 from update 100 on, and training ends after {0}" + GIVE


@pytest.mark.parametrize(
    "limits, place, line",
    [
        ({"max_update": 98}, (1, 0), BEFORE.format(98)),
        ({"max_update": 99}, (1, 0), None),
        ({"max_update": 103}, (1, 0), BEYOND.format(103)),
        # Nineteen batches are ten updates in the first epoch, and five in the others.
        ({"max_epoch": 19}, (1, 0), None),
        ({"max_epoch": 17, "max_update": 5000}, (1, 0), BEFORE.format(90)),
        # After --reset-dataloader and --reset-optimizer; in mid-epoch, where three updates are left.
        ({"max_epoch": 17, "updates": 10}, (1, 0), None),
        ({"max_epoch": 19, "updates": 0}, (3, 0), BEFORE.format(85)),
        ({"max_epoch": 3, "updates": 92}, (2, 8), None),
        ({"max_update": 19, "warmup_updates": 20}, (1, 0), f"{WITHIN}: lower --warmup-updates 20"),
    ],
)
def test_the_end_of_a_schedule(limits, place, line):
    training = trainer(**limits)
    training.last_update = logs.last_update(training, epochs_of(19, *place))
    assert logs.describe_schedule(training) == line


def test_how_to_go_on():
    def said(saved, **options):
        return stopping._how_to_go_on(OmegaConf.structured(CheckpointConfig(**options)), saved)

    saved, last = "s/checkpoint1.pt", "s/checkpoint_last.pt"
    assert said(saved) == f"the same command goes on from {last}"
    assert said(saved, no_last_checkpoints=True) == f"--restore-file {saved} goes on from there"
    assert said(None, no_last_checkpoints=True) == "nothing was saved (--no-last-checkpoints)"
    command = said(saved, reset_lr_scheduler=True)
    assert command == f"without --reset-lr-scheduler, the same command goes on from {last}"


def test_signals_are_left_to_programs_with_a_loop_of_their_own(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(stopping, "training_loops", lambda: iter(()))
    stopping.listen(SimpleNamespace(data_parallel_world_size=1))
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_batch_that_is_tried_again_is_one_step(monkeypatch):
    """All workers count as many."""
    steps, inner = [], []
    monkeypatch.setattr(stopping, "end_if_agreed", steps.append)

    def valid_step(trainer, sample, raise_oom):
        inner.append(raise_oom)
        return inner[-1] or start.valid_step(valid_step, trainer, sample, raise_oom=True)

    assert start.valid_step(valid_step, "trainer", {}) and (steps, inner) == (["trainer"], [False, True])


def test_workers_that_share_experts_meet_in_every_batch():
    for options, seen in (({}, [1]), ({"base_layers": 1}, [1, {}])):
        trainer = SimpleNamespace(is_fsdp=False, cfg=SimpleNamespace(model=SimpleNamespace(**options)))
        assert distribute.train_step(lambda trainer, samples: samples, trainer, [1, {}]) == seen
