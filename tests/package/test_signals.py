"""SIGTERM and Ctrl-C: the processes that were started end, temporary files go, and trainings are saved."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers.chars_cli import names, write_splits
from helpers.chars_cli import run as prepare_chars
from helpers.cli import HANGS, USER_DIR, fairseq_train, json_log, model_of
from helpers.in_process import LOG, Log, acting_at, char_lm, train
from helpers.parallel_cli import script, sentences, write_files

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.compat.stopping import StopRequest
from rhhn_fairseq.programs import Terminated, interrupted_by_sigterm

SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130}
ENDING = SIGNALS | {signal.SIGUSR1: 138, signal.SIGHUP: 129}


def kill(signum):
    os.kill(os.getpid(), signum)
    time.sleep(10)


@pytest.mark.parametrize("signum", SIGNALS)
def test_status_of_a_program(signum):
    before = signal.getsignal(signal.SIGTERM)
    assert cli.run(lambda: kill(signum)) == SIGNALS[signum]
    assert signal.getsignal(signal.SIGTERM) == before


def test_cleaning_up_is_not_interrupted_by_a_second_signal():
    cleaned = []
    with pytest.raises(Terminated), interrupted_by_sigterm():
        try:
            kill(signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)
    assert cleaned


@pytest.mark.parametrize("signum", SIGNALS)
def test_an_interrupted_preparation_leaves_nothing(tmp_path, monkeypatch, capsys, signum):
    options = write_splits(tmp_path)
    before = names(tmp_path)
    monkeypatch.setattr("rhhn_fairseq.data.text.prepare._build", lambda *arguments: kill(signum))
    status = prepare_chars("text", *options, "--dest", tmp_path / "a" / "dest")
    assert status == SIGNALS[signum]
    assert capsys.readouterr().err == "error: interrupted; nothing was prepared\n"
    # The directory above may stay, without anything in it.
    assert names(tmp_path) in (before, ["a", *before]) and not list((tmp_path / "a").glob("*"))


@pytest.mark.slow
@pytest.mark.timeout(HANGS)
@pytest.mark.parametrize("stage", ["pieces", "binary"])
def test_a_translation_corpus_is_interrupted_in_every_stage(tmp_path, stage):
    options = write_files(tmp_path, train=sentences(60_000))
    before = {*names(tmp_path), ".dest.work"}
    command = script("files", *options, "--vocab-size", 60, "--workers", 2, "--dest", tmp_path / "dest")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line == f"stage {stage}\n":
                break
        process.terminate()
        process.wait(20)
        assert "the same command continues at the first unfinished stage" in process.stderr.read()
    assert process.returncode == 143
    assert {*names(tmp_path)} <= before
    assert not [name for name in names(tmp_path / ".dest.work") if name.endswith(".tmp")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tmp_path_factory.mktemp("corpus")


def signal_at(signum, pattern):
    """Sends this process a signal when a record of the log says so."""
    return acting_at(pattern, lambda: os.kill(os.getpid(), signum))


def stopped(log) -> str:
    (line,) = [message for message in log.messages if "stopped after" in message]
    return line


END = ["--max-update", 16]


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("whole")
    return train(*char_lm(corpus, save_dir, *END)), save_dir


@pytest.fixture
def hears():
    """As in a terminal. Under nohup this process ignores SIGHUP, and so would a training."""
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signum", ENDING)
def test_a_training_saves_when_it_is_interrupted(corpus, uninterrupted, tmp_path, signum, hears):
    """The run that goes on has the losses of one that was not interrupted."""
    before = {number: signal.getsignal(number) for number in ENDING}
    first = Log()
    with pytest.raises(SystemExit) as ended, signal_at(signum, '"num_updates": "5"'):
        train(*char_lm(corpus, tmp_path, *END), log=first)
    assert ended.value.code == ENDING[signum]
    last = tmp_path / "checkpoint_last.pt"
    name = signal.Signals(signum).name
    assert stopped(first) == f"{name}: stopped after update 5; the same command goes on from {last}"
    assert names(tmp_path) == ["checkpoint_last.pt"]
    assert {number: signal.getsignal(number) for number in ENDING} == before
    second = train(*char_lm(corpus, tmp_path, *END))
    assert first.losses + second.losses == uninterrupted[0].losses
    expected, found = model_of(uninterrupted[1]), model_of(tmp_path)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.slow
def test_a_last_validation_is_made_up_for(corpus, tmp_path, monkeypatch):
    """end_where_complete: the next start makes no update, validates, and has the files of any other run."""
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    # The first epoch would be validated too.
    options = ["--max-epoch", 2, "--validate-after-updates", 44]
    arguments = [option for option in char_lm(corpus, tmp_path, *options) if option != "--disable-validation"]
    with pytest.raises(SystemExit), signal_at(signal.SIGTERM, "begin validation on"):
        train(*arguments)
    assert names(tmp_path) == ["checkpoint_last.pt"]
    before = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    log = train(*arguments)
    assert not log.updates and any("valid_loss" in message for message in log.messages)
    assert names(tmp_path) == ["checkpoint_best.pt", "checkpoint_last.pt"]
    after = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert after["extra_state"]["train_iterator"] == before["extra_state"]["train_iterator"]
    assert after["extra_state"]["val_loss"] is not None
    # There is nothing left to make up for.
    assert not any("valid_loss" in message for message in train(*arguments).messages)


# A rate that falls after each validation, because none improves by the threshold.
PLATEAU = ["--lr-scheduler", "reduce_lr_on_plateau", "--lr-patience", 0, "--lr-threshold", 10]
PLATEAU += ["--lr-shrink", 0.5, "--max-update", 50]


def validations(log: Log) -> list[tuple]:
    """The epoch, the update and the loss of each validation."""
    records = [json.loads(message) for message in log.messages if message.startswith('{"epoch"')]
    names = ("epoch", "valid_num_updates", "valid_loss")
    return [tuple(record[name] for name in names) for record in records if "valid_loss" in record]


@pytest.mark.parametrize(
    "interval, pattern",
    [(None, "last update"), pytest.param(7, "begin validation on", marks=pytest.mark.slow)],
)
def test_a_validation_is_made_up_for(corpus, tmp_path, monkeypatch, interval, pattern):
    """end_where_complete: with it, the run that goes on is the one that was not interrupted."""
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    more = PLATEAU if interval is None else ["--validate-interval-updates", interval, "--max-update", 23]
    line = [option for option in char_lm(corpus, tmp_path / "one", *more) if option != "--disable-validation"]
    expected = train(*line)
    line = [tmp_path / "two" if option == tmp_path / "one" else option for option in line]
    first = Log()
    pattern = f'"num_updates": "{interval or 22}"' if pattern == "last update" else pattern
    with pytest.raises(SystemExit), signal_at(signal.SIGTERM, pattern):
        train(*line, log=first)
    second = train(*line)
    assert len(validations(expected)) > 2 and not validations(first)
    assert validations(second) == validations(expected)
    both = first.updates + second.updates
    # Where nothing is left to train, no update is summed up; the validation is none.
    told = [message for message in second.messages if "the first in" in message]
    assert [message.rpartition(" loss ")[2] for message in told] == [u["loss"] for u in second.updates[:1]]
    assert [update["loss"] for update in both] == expected.losses
    assert [update["lr"] for update in both] == [update["lr"] for update in expected.updates]
    for name in ("best", "last"):
        one, two = (torch.load(tmp_path / run / f"checkpoint_{name}.pt") for run in ("one", "two"))
        assert all(torch.equal(two["model"][key], one["model"][key]) for key in one["model"])
        assert one["extra_state"]["best"] == two["extra_state"]["best"]


def test_a_second_interruption_ends_at_once():
    request = StopRequest()
    request.listen(several=False)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.signum == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)
    finally:
        request.listen_no_more()


STUCK = """
import ctypes
from rhhn_fairseq.compat import stopping
stopping.SECONDS_TO_AGREE = 0.2
stopping.StopRequest().listen(several=True)
print("ready", flush=True)
lock, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
library.pthread_mutex_lock(lock)
library.pthread_mutex_lock(lock)
"""


def test_a_worker_whose_peer_is_dead_ends():
    """Its main thread never returns to Python, as in a collective operation, so that no handler runs."""
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(20) == 143
        assert "error: the workers do not answer each other" in process.stderr.read()


class Store(dict):
    """The job's store, within one process."""

    def check(self, keys):
        return all(key in self for key in keys)

    def compare_set(self, key, expected, value):
        self.setdefault(key, value)

    def get(self, key):
        return self[key].encode()


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("signalled", [{0: 3}, {1: 3}, {0: 3, 1: 4}])
def test_workers_agree_on_their_last_step(monkeypatch, signalled, late):
    """Each ends a step when both have begun it; the signals reach them before one of their steps ends."""
    store = Store()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    trainer = SimpleNamespace(data_parallel_world_size=2)
    workers, last = [StopRequest(), StopRequest()], {}
    for step in range(1, 8):
        for rank in (late, 1 - late):
            if signalled.get(rank) == step:
                workers[rank].signum = signal.SIGTERM
            if workers[rank].agreed(trainer):
                last.setdefault(rank, step)
    assert last[0] == last[1] <= 5 and {worker.signum for worker in workers} == {signal.SIGTERM}


@pytest.mark.slow
@pytest.mark.timeout(HANGS)
def test_torchrun_workers_save_together(corpus, tmp_path):
    """A signal for torchrun reaches all workers; each leaves when the checkpoint is written."""
    arguments = [*char_lm(corpus, tmp_path / "cut", "--max-update", 100_000), *LOG, "--user-dir", USER_DIR]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
    command += ["--nproc-per-node", "2", "-m", "fairseq_cli.train", *map(str, arguments)]
    seen = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            seen.append(line)
            if '"num_updates": "20"' in line:
                process.terminate()
    output = "".join(seen)
    assert process.returncode != 0
    (update,) = re.findall(r"SIGTERM: stopped after update (\d+); the same command goes on from", output)
    assert names(tmp_path / "cut") == ["checkpoint_last.pt"]
    log = [record["loss"] for record in json_log(output) if record["tag"] == "train_inner"]
    assert len(log) == int(update)
    end = ["--max-update", int(update) + 3]
    rest = fairseq_train(char_lm(corpus, tmp_path / "cut", *end, *LOG), workers=2)
    expected = fairseq_train(char_lm(corpus, tmp_path / "whole", *end, *LOG), workers=2)
    found = log + [record["loss"] for record in json_log(rest.stdout) if record["tag"] == "train_inner"]
    assert found == [record["loss"] for record in json_log(expected.stdout) if record["tag"] == "train_inner"]
