"""SIGTERM and Ctrl-C: the processes that were started end, temporary files go, and trainings are saved."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from chars_cli import names, prepare_chars, write_splits
from parallel_cli import error_of, script, sentences, write_files

from rhhn_fairseq import cli
from rhhn_fairseq.data.parallel.prepare import most_workers
from rhhn_fairseq.signals import Terminated, interrupted_by_sigterm

SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130}


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
    monkeypatch.setattr("rhhn_fairseq.data.prepare._build", lambda *arguments: kill(signum))
    status = prepare_chars.main(["text", *options, "--dest", str(tmp_path / "a" / "dest")])
    assert status == SIGNALS[signum]
    assert capsys.readouterr().err == "error: interrupted; nothing was prepared\n"
    assert names(tmp_path) == before


@pytest.mark.parametrize("workers", [0, -1, most_workers() + 1, 100_000])
def test_absurd_numbers_of_workers_are_refused(capsys, workers):
    message = f"--workers {workers}: must be 1 or more, and {most_workers()} at most on this machine"
    assert message in error_of(capsys, "synthetic", "--workers", workers)


def children(pid: int) -> list[int]:
    """The processes below a process, without those of multiprocessing that only watch over others."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return [child for child in found if b"resource_tracker" not in command_line(child)]


def command_line(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            if found := condition():
                return found
        time.sleep(0.01)
    raise AssertionError("it did not come to pass")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="looks for processes in /proc")
@pytest.mark.parametrize("stage", ["pieces", "encoded", "binary"])
def test_a_translation_corpus_is_interrupted_in_every_stage(tmp_path, stage):
    """Two workers are two processes, and all have ended when the program has."""
    options = write_files(tmp_path, train=sentences(60_000))
    before = {*names(tmp_path), ".dest.work"}
    command = script("files", *options, "--vocab-size", 60, "--workers", 2, "--dest", tmp_path / "dest")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line == f"stage {stage}\n":
                break
        started = []
        if stage != "pieces":
            # fairseq-preprocess is a third process, which waits for the two that it starts.
            number = 2 if stage == "encoded" else 3
            started = wait_for(lambda: (found := children(process.pid)) and len(found) >= number and found)
            assert len(started) == number
        process.terminate()
        process.wait(20)
        assert "the same command continues at the first unfinished stage" in process.stderr.read()
    assert process.returncode == 143
    assert {*names(tmp_path)} <= before
    assert not [name for name in names(tmp_path / ".dest.work") if name.endswith(".tmp")]
    wait_for(lambda: not any(command_line(child) for child in started), 10)
