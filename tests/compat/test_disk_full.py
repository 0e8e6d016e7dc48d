"""A disk that is full while a checkpoint is saved: one line, no pieces, and the last checkpoint as it was."""

import errno
import os
import re
import resource
import subprocess
from contextlib import contextmanager

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from helpers.cli import fairseq_train
from helpers.in_process import char_lm, train

from rhhn_fairseq import plugin as compat
from rhhn_fairseq.errors import UsageError

compat.apply()
TOO_LARGE = os.strerror(errno.EFBIG)


@contextmanager
def full_disk(room: int):
    """Every file of this process ends after ``room`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Before the first record, and at the archive's end.
@pytest.mark.parametrize("room", [0, 2_200_000])
def test_a_checkpoint_that_does_not_fit_leaves_nothing(tmp_path, room):
    state = {"model": {"weight": torch.zeros(500_000)}, "notes": ["x" * 100] * 4000}
    last = tmp_path / "checkpoint_last.pt"
    checkpoint_utils.torch_persistent_save({"model": {}}, str(last))
    before = last.read_bytes()
    torch.save(state, tmp_path / "size")
    room = min(room, (tmp_path / "size").stat().st_size - 10)
    (tmp_path / "size").unlink()
    for path in (tmp_path / "checkpoint_1_5.pt", last):
        message = re.escape(f"{path}: cannot be written (")
        with full_disk(room), pytest.raises(UsageError, match=f"^{message}"):
            checkpoint_utils.torch_persistent_save(state, str(path))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_last.pt"]
    assert last.read_bytes() == before


def test_a_copy_that_does_not_fit_leaves_nothing(tmp_path):
    """copy_completely: checkpoint_last.pt is a copy of what was saved under another name."""
    saved, last = tmp_path / "checkpoint_1_5.pt", tmp_path / "checkpoint_last.pt"
    saved.write_bytes(b"new" * 1000)
    last.write_bytes(b"old")

    refused = pytest.raises(UsageError, match=re.escape(f"{last}: cannot be written ({TOO_LARGE})"))
    with full_disk(2000), refused:
        PathManager.copy(str(saved), str(last), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [saved.name, last.name]
    assert last.read_bytes() == b"old"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_training_on_a_full_disk(tmp_path, small_disk):
    """The disk fills with the checkpoints; the run ends in one line and goes on when there is room."""
    command = char_lm(tmp_path / "corpus", small_disk, "--save-interval-updates", 3, "--max-update", 3000)
    result = fairseq_train(command, check=False)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(rf"error: {small_disk}/checkpoint_\S+.pt: cannot be written \(.*\)", line)
    assert "Traceback" not in result.stdout
    names = [path.name for path in small_disk.iterdir()]
    assert "checkpoint_last.pt" in names and all(re.fullmatch(r"checkpoint_\w+\.pt", name) for name in names)
    for path in small_disk.iterdir():
        torch.load(path, weights_only=True)
    for path in small_disk.glob("checkpoint_*_*.pt"):
        path.unlink()
    updates = torch.load(small_disk / "checkpoint_last.pt", weights_only=True)["optimizer_history"]
    end = updates[-1]["num_updates"] + 2
    log = train(*char_lm(tmp_path / "corpus", small_disk, "--max-update", end))
    assert [record["num_updates"] for record in log.updates] == [str(end - 1), str(end)]
