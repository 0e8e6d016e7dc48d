"""Processes that read data: they end when the training ends them, and a lost one is an error of one line."""

import multiprocessing
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from helpers.cli import HANGS, run_module
from helpers.in_process import Log, acting_at, char_lm, train
from torch.utils.data import DataLoader

from rhhn_fairseq import plugin as compat
from rhhn_fairseq.compat.errors import message_of
from rhhn_fairseq.errors import UsageError

compat.apply()


def reader(items: int) -> DataLoader:
    """One process that hands on tensors of 400 kB. Its time-out is there for the test only."""
    return DataLoader([torch.ones(100_000)] * items, num_workers=1, collate_fn=list, timeout=60)


def test_a_batch_that_does_not_fit_into_shared_memory_is_one_line():
    """end_data_workers_with_training: the training would wait for it for ever."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UsageError) as error:
            list(reader(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "a data worker cannot hand on a batch (" in message_of(error.value)


def test_a_data_worker_ends_for_its_parent_only():
    """A signal to the process group, which the training notes, does not end it."""
    batches = iter(reader(6))
    next(batches)
    (worker,) = batches._workers
    for name in ("-TERM", "-INT", "-USR1", "-HUP"):
        subprocess.run(["kill", name, str(worker.pid)], check=True)
    assert len(list(batches)) == 5
    batches = iter(reader(6))
    next(batches)
    (worker,) = batches._workers
    worker.terminate()
    worker.join(300)
    assert worker.exitcode == 0


MISSES_ITS_SIGNAL = """
import os, signal, subprocess
import fairseq_cli, torch
from torch.utils.data import DataLoader
import rhhn_fairseq.plugin
batches = iter(DataLoader([torch.ones(1)] * 9, num_workers=1))
next(batches)
(worker,) = batches._workers
os.kill(worker.pid, signal.SIGSTOP)
subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {worker.pid}"])
"""


@pytest.mark.slow
def test_a_program_does_not_wait_for_a_worker_that_misses_its_signal():
    command = [sys.executable, "-c", MISSES_ITS_SIGNAL]
    result = subprocess.run(command, check=True, timeout=HANGS, capture_output=True, text=True)
    assert "error" not in result.stderr and "Traceback" not in result.stderr


AFTER_TWO_UPDATES = '"num_updates": "2"'


def line(tmp_path, *options):
    return char_lm(tmp_path / "corpus", tmp_path / "run", "--num-workers", 1, "--max-update", 20, *options)


def kill_workers():
    for worker in multiprocessing.active_children():
        worker.kill()


def test_a_killed_data_worker_is_one_line(tmp_path):
    lost = pytest.raises(UsageError, match=r"^DataLoader worker \(pid.*; if memory or /dev/shm is full")
    with acting_at(AFTER_TWO_UPDATES, kill_workers), lost:
        train(*line(tmp_path))


def lose_worker_to_signal():
    """A signal to the group has also ended a worker, and PyTorch says so between two updates."""
    signal.raise_signal(signal.SIGTERM)
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated. ")


@pytest.mark.slow
def test_a_signal_wins_over_the_error_that_it_causes(tmp_path):
    """The run that goes on has the losses of one that was not interrupted."""
    first = Log()
    with acting_at(AFTER_TWO_UPDATES, lose_worker_to_signal), pytest.raises(SystemExit) as ended:
        train(*line(tmp_path), log=first)
    assert ended.value.code == 143
    assert any("SIGTERM: stopped after update 2; the same command" in text for text in first.messages)
    whole = train(*line(tmp_path, "--save-dir", tmp_path / "whole"))
    # The error came while update 2 was being logged, so the next logged loss is the mean of two updates.
    assert train(*line(tmp_path)).losses[1:] == whole.losses[3:]
    # Of several trainings in a process, as in a sweep, none leaves its data workers beside the next.
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_nothing_is_left_in_the_temporary_directory(tmp_path):
    """In a new process, because one that has started workers before has its directory already."""
    arguments = char_lm(tmp_path / "corpus", tmp_path / "run", "--num-workers", 1, "--max-update", 2)
    # The path of a socket in it may have 108 characters.
    with tempfile.TemporaryDirectory() as place:
        run_module("fairseq_cli.train", arguments, env={"TMPDIR": place})
        assert not list(Path(place).glob("pymp-*"))
