"""scripts/train_torchrun.sh: the command it starts, what it refuses, and workers that are killed."""

import inspect
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask
from helpers.cli import HANGS, USER_DIR, json_log, model_of
from helpers.tiny_translation import lstm, prepare
from helpers.torchrun_script import SCRIPT, environment

import rhhn_fairseq.plugin  # noqa: F401

RUN = ["data", "--save-dir", "runs"]


def launch(*arguments, **values):
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(**values), timeout=HANGS)


def command(*arguments, **values) -> str:
    """What would be run, without the interpreter's path."""
    result = launch("--dry-run", *arguments, **values)
    assert result.returncode == 0, result.stderr
    return result.stdout.replace(sys.executable, "python").removesuffix("\n")


def refusal(*arguments, **values) -> str:
    result = launch(*arguments, **values)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_one_machine():
    expected = (
        "OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --local-addr localhost "
        "--nproc-per-node 500 --max-restarts 3 -m fairseq_cli.train data --save-dir runs --cpu "
        f"--user-dir {USER_DIR}"
    )
    assert command("--nproc", 500, *RUN, "--cpu") == expected
    assert command("--nproc", 500, "--", *RUN, "--cpu") == expected
    assert command(*RUN, "--cpu", NPROC="500") == expected
    # An option goes before the environment, and what is fairseq's own stays as it is.
    assert command("--nproc=500", *RUN, "--cpu") == expected
    own = [*RUN, "--user-dir", "mine"]
    other = command("--nproc", 2, "--max-restarts", 0, *own, NPROC="7", MAX_RESTARTS="5")
    assert other.endswith(f"--nproc-per-node 2 --max-restarts 0 -m fairseq_cli.train {' '.join(own)}")


def test_several_machines():
    shown = command("--nproc", 4, "--nnodes", 2, "--rdzv-endpoint", "first:29400", *RUN)
    assert "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint first:29400 --rdzv-id rhhn_fairseq" in shown
    # The name leads nowhere, so torchrun is left to find out.
    assert "--standalone" not in shown and "--local-addr" not in shown
    shown = command("--nproc", 4, "--nnodes", 2, "--rdzv-endpoint", "127.0.0.1:29400", *RUN)
    assert "--rdzv-id rhhn_fairseq --local-addr 127.0.0.1 --nproc-per-node 4" in shown
    values = {"NNODES": "2:4", "RDZV_ENDPOINT": "first:1", "RDZV_ID": "mine", "NPROC": "1"}
    assert "--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint first:1 --rdzv-id mine" in command(
        *RUN, **values
    )


def test_a_slurm_step(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames gpu[07-09]" ] && printf "gpu07\\ngpu08\\ngpu09\\n"\n'
    )
    scontrol.chmod(0o755)
    step = {"SLURM_JOB_ID": "123456", "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_STEP_NUM_NODES": "3"}
    step |= {"SLURM_STEP_NUM_TASKS": "3", "PATH": f"{tmp_path}:{os.environ['PATH']}", "NPROC": "8"}
    assert "--nnodes 3 --rdzv-backend c10d --rdzv-endpoint gpu07:29856 --rdzv-id 123456" in command(
        *RUN, **step
    )
    by_hand = command("--rdzv-endpoint", "gpu08:1", *RUN, **step)
    assert "--rdzv-endpoint gpu08:1 --rdzv-id 123456" in by_hand
    error = refusal(*RUN, **step | {"SLURM_STEP_NUM_TASKS": "24"})
    assert "srun started 24 tasks on 3 nodes, one a node is right" in error
    # In an allocation but not under srun, this machine is all there is.
    assert "--standalone" in command(*RUN, SLURM_JOB_ID="1", SLURM_JOB_NUM_NODES="3", NPROC="8")


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ([], "name a data directory"),
        (["--nproc", "two", *RUN], "--nproc two is not"),
        (["--nnodes", "2", "--nproc", "1", *RUN], "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ([*RUN, "--cpu"], "--cpu needs the number of workers: --nproc N"),
        ([*RUN, "--cpu", "--nproc", "2"], "--nproc is an option of this script: give it before the data"),
        ([*RUN, "--restore-file", "x.pt"], "--restore-file would apply to every restart"),
        ([*RUN, "--reset-dataloader"], "--reset-dataloader would apply"),
        ([*RUN, "--no-save"], "--no-save leaves no last checkpoint"),
    ],
)
def test_refusals_are_one_line(arguments, reason):
    assert reason in refusal(*arguments)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_number_of_workers_is_asked_for():
    assert "there is no GPU here; for workers on the CPU pass --nproc N" in refusal(*RUN)
    # What would be run can be read on any machine.
    assert "--nproc-per-node 1" in command(*RUN)


class Words(FairseqDataset):
    """Sentences of one or two words; those of equal length come in a random order, as fairseq's do."""

    def __len__(self):
        return 40

    def ordered_indices(self):
        shuffled = np.random.permutation(len(self))
        return shuffled[np.argsort(shuffled % 2, kind="mergesort")]

    def num_tokens(self, index):
        return 1 + index % 2

    num_tokens_vec = None
    size = num_tokens

    def batch_by_size(self, indices, **options):
        return [list(indices[first : first + 4]) for first in range(0, len(indices), 4)]

    def __getitem__(self, index):
        return index

    def collater(self, samples):
        return samples


def batches_of_epoch_three(**options):
    """What a run that has trained since epoch 1 sees in epoch 3, and what one sees that starts there."""
    seen = []
    for start_epoch in (1, 3):
        task, words = FairseqTask(None), Words()
        for epoch in range(start_epoch, 4):
            iterator = task.get_batch_iterator(words, seed=5, epoch=epoch, **options)
            assert iterator.next_epoch_idx == epoch
            batches = list(iterator.next_epoch_itr())
        seen.append(batches)
    return seen


@pytest.mark.filterwarnings("ignore:'pin_memory'")
def test_a_restart_has_the_batches_of_the_run_it_goes_on_with(monkeypatch):
    went_on, started = batches_of_epoch_three()
    assert went_on == started
    assert sorted(sum(went_on, [])) == list(range(40))
    # Batches that are made anew for every epoch were alike before.
    went_on, started = batches_of_epoch_three(update_epoch_batch_itr=True)
    assert went_on == started
    plain = inspect.unwrap(FairseqTask.get_batch_iterator)
    monkeypatch.setattr(FairseqTask, "get_batch_iterator", plain)
    went_on, started = batches_of_epoch_three()
    assert went_on != started


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("corpus"))


def training(data, save_dir) -> list[str]:
    options = ["--max-update", 60, "--save-interval-updates", 7, "--no-epoch-checkpoints"]
    options += ["--log-format", "json", "--log-interval", 1, "--num-workers", 0]
    return [str(argument) for argument in lstm(data, save_dir, *options, size=16)]


@contextmanager
def start(*arguments, **values):
    """The launcher, all of whose output comes through one pipe; it has ended when the context has."""
    process = subprocess.Popen(
        ["bash", str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(OMP_NUM_THREADS="1", **values),
    )
    with process:
        try:
            yield process
        except BaseException:
            # torchrun ends its workers, which are in sessions of their own.
            process.terminate()
            raise


def updates(line: str) -> list[int]:
    return [int(record["num_updates"]) for record in json_log(line) if record["tag"] == "train_inner"]


def worker(agent: int, rank: int) -> int:
    """The process of a worker of the launcher, which has become torchrun."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"{agent} has no worker {rank}")


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("undisturbed")
    with start("--nproc", 2, *training(data, save_dir)) as process:
        log = process.stdout.read()
    assert process.returncode == 0, log
    return model_of(save_dir)


@pytest.mark.slow
@pytest.mark.timeout(HANGS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds the workers in /proc")
def test_a_killed_worker_comes_back_and_goes_on(data, undisturbed, tmp_path, rank):
    log, seen, killed_at = [], [], None
    with start("--nproc", 2, *training(data, tmp_path)) as process:
        for line in process.stdout:
            log.append(line)
            seen += updates(line)
            if killed_at is None and seen[-1:] == [25]:
                os.kill(worker(process.pid, rank), signal.SIGKILL)
                killed_at = len(log)
    output = "".join(log)
    assert process.returncode == 0, output
    before, after = "".join(log[:killed_at]), "".join(log[killed_at:])
    assert "Loaded checkpoint" not in before
    # They may have come a little further before they were stopped.
    (place,) = re.findall(r"Loaded checkpoint (\S+) \(epoch \d+ @ (\d+) updates\)", after)
    assert place[0] == str(tmp_path / "checkpoint_last.pt")
    resumed_at = int(place[1])
    assert 21 <= resumed_at < 60
    left = 60 - resumed_at
    assert seen[:-left] == list(range(1, len(seen) - left + 1))
    assert seen[-left:] == list(range(resumed_at + 1, 61))
    found = model_of(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())


@pytest.mark.slow
@pytest.mark.timeout(HANGS)
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds the workers in /proc")
def test_a_job_that_slurm_warns_saves(data, tmp_path):
    """All its processes get the signal. torchrun hands it on and waits, where it would die of it."""
    log = []
    with start("--nproc", 2, *training(data, tmp_path)) as process:
        for line in process.stdout:
            log.append(line)
            if updates(line) == [25]:
                for one in (process.pid, worker(process.pid, 0), worker(process.pid, 1)):
                    os.kill(one, signal.SIGUSR1)
    assert process.returncode == 1
    (stopped,) = re.findall(r"SIGUSR1: stopped after update (\d+)", "".join(log))
    last = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert last["optimizer_history"][-1]["num_updates"] == int(stopped) < 60


@pytest.mark.slow
@pytest.mark.timeout(HANGS)
def test_two_machines_meet(data, undisturbed, tmp_path):
    """Two agents on this machine, a worker each, train what two workers of one agent train."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    options = ["--nnodes", 2, "--nproc", 1, "--rdzv-endpoint", endpoint]
    with start(*options, *training(data, tmp_path)) as one, start(*options, *training(data, tmp_path)) as two:
        logs = one.communicate(timeout=HANGS)[0], two.communicate(timeout=HANGS)[0]
    assert (one.returncode, two.returncode) == (0, 0), logs
    assert sorted(len(updates(log)) for log in logs) == [0, 60]
    found = model_of(tmp_path)
    assert all(torch.equal(found[name], value) for name, value in undisturbed.items())
