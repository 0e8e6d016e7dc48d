"""Where the time of an update of fairseq-train goes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.cli import HANGS, lstm

from benchmarks import profile
from benchmarks.profile import OTHER, Clock

ROOT = Path(__file__).parents[2]


def test_times_are_exclusive(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = Clock()
    with clock.stage("outer"):
        clock.timed("inner", lambda: None)()
    clock.look()
    assert clock.seconds == {OTHER: 1.0 + 5.0, "outer": 2.0 + 4.0, "inner": 3.0}


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.profile", "--updates", "3", "--warm-up", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, env=environment,
        timeout=HANGS, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_parts_of_a_training_step(tiny_corpus, tmp_path):
    figures = tmp_path / "figures.json"
    training = lstm(tiny_corpus, tmp_path / "checkpoints", "--lr", 0.01)
    result = run("--json", figures, "--", *training)
    assert result.returncode == 0, result.stderr
    report = json.loads(figures.read_text())
    rows = {row["part"]: row for row in report["rows"]}
    expected = ["forward and loss", "backward", "optimizer", "scaling and clipping gradients", "log lines"]
    assert {*expected, "reading batches", "clearing gradients", "statistics"} <= set(rows)
    assert all(row["ms an update"] > 0 for row in rows.values())
    assert sum(row["share %"] for row in rows.values()) == pytest.approx(100)
    assert result.stdout.splitlines()[-1].startswith("The model (forward and loss and backward) takes ")
    # The warm-up does not count.
    assert 0 < report["tokens"] <= 3 * training[training.index("--max-tokens") + 1]
    assert not any(tmp_path.glob("checkpoints/*"))


@pytest.mark.slow
def test_too_short_a_training_is_reported(tiny_corpus, tmp_path):
    result = run("--", *lstm(tiny_corpus, tmp_path / "checkpoints", "--lr", 0.01, "--max-update", 2))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: the training ended before 1 + 3 updates")


def test_every_part_has_its_place():
    """Names that fairseq would have to change for a part to be lost unseen."""
    assert all(hasattr(profile.Trainer, name) for name in profile.OF_TRAINER)
