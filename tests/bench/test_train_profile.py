"""scripts/profile_train.py: where the time of an update of fairseq-train goes."""

import json
import time

import pytest
from helpers.cli import lstm, run_script

from rhhn_fairseq.bench import train_profile
from rhhn_fairseq.bench.train_profile import OTHER, Clock, Config
from rhhn_fairseq.errors import UsageError


def test_times_are_exclusive(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = Clock()
    with clock.stage("outer"):
        clock.timed("inner", lambda: None)()
    clock.look()
    assert clock.seconds == {OTHER: 1.0 + 5.0, "outer": 2.0 + 4.0, "inner": 3.0}


def test_an_error_closes_its_part():
    clock = Clock()
    with pytest.raises(ValueError), clock.stage("outer"):
        raise ValueError
    assert clock._open == [OTHER]


def test_parts_of_a_training_step(tiny_corpus, tmp_path):
    figures = tmp_path / "figures.json"
    training = lstm(tiny_corpus, tmp_path / "checkpoints", "--optimizer", "fused_adam")
    result = run_script(
        "profile_train.py", "--updates", 3, "--warm-up", 1, "--json", figures, "--", *training, "--lr", 0.01
    )
    report = json.loads(figures.read_text())
    rows = {row["part"]: row for row in report["rows"]}
    expected = ["forward and loss", "backward", "optimizer", "scaling and clipping gradients", "log lines"]
    assert {*expected, "reading batches", "clearing gradients", "statistics"} <= set(rows)
    assert all(row["ms"] > 0 for row in rows.values())
    assert sum(row["share"] for row in rows.values()) == pytest.approx(100)
    table = result.stdout.splitlines()
    assert table[-1].startswith("The model (forward and loss and backward) takes ")
    assert table[-1].endswith(f", {report['tokens'] / report['seconds']:,.0f} target tokens a second.")
    # The warm-up does not count.
    assert 0 < report["tokens"] <= 3 * training[training.index("--max-tokens") + 1]
    assert not (tmp_path / "checkpoints").exists()


def test_too_short_a_training_is_reported(tiny_corpus, tmp_path):
    training = lstm(tiny_corpus, tmp_path / "checkpoints", "--optimizer", "adam")
    limits = ["--updates", 3, "--warm-up", 1]
    more = ["--lr", 0.01, "--max-update", 2]
    result = run_script("profile_train.py", *limits, "--", *training, *more, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: the training ended before 1 + 3 updates")


def test_no_updates_are_refused():
    with pytest.raises(UsageError, match="updates=0 is too small, the smallest is 1"):
        Config(updates=0)


def test_every_part_has_its_place():
    """Names that fairseq would have to change for a part to be lost unseen."""
    assert all(hasattr(train_profile.Trainer, name) for name in train_profile.OF_TRAINER)
