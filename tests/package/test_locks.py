"""Two processes on one directory: the second is refused, and a lock ends with its process."""

import errno
import fcntl
import logging
import os

import pytest
from helpers.chars_cli import error_of, names, run, write_splits
from helpers.lock_holder import holder

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.locks import locked


def test_a_second_process_is_refused_with_the_first_one_s_number(tmp_path):
    path = tmp_path / "lock"
    with holder(path) as first:
        refused = pytest.raises(UsageError, match=rf"^taken \(process {first.pid} on .+\)$")
        with refused, locked(path, "taken"):
            raise AssertionError("two processes have the lock")
    with locked(path, "taken"):
        assert names(tmp_path) == ["lock"]
    assert names(tmp_path) == []


def test_a_killed_process_holds_nothing(tmp_path):
    """Not even if a process that it forked, such as a data loader's, is still alive."""
    path = tmp_path / "lock"
    with holder(path, "fork") as first:
        first.kill()
        first.wait()
        assert path.exists()
        with locked(path, "taken"):
            pass
    assert names(tmp_path) == []


def test_a_process_may_take_its_own_lock_again(tmp_path):
    path = tmp_path / "lock"
    with locked(path, "taken"):
        with locked(path, "taken"):
            pass
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EROFS])
def test_without_locks_work_goes_on(tmp_path, monkeypatch, caplog, error):
    def refuse(*arguments):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.DEBUG, "rhhn_fairseq.locks"), locked(tmp_path / "lock", "taken"):
        pass
    assert f"cannot be locked ({os.strerror(error)})" in caplog.text
    with locked(tmp_path / "missing" / "lock", "taken"):
        assert not (tmp_path / "missing").exists()


def test_two_preparations_of_one_destination(tmp_path, capsys):
    options = ["text", *write_splits(tmp_path), "--dest", tmp_path / "a" / "dest"]
    (tmp_path / "a").mkdir()
    with holder(tmp_path / "a" / ".dest.lock"):
        message = error_of(capsys, *options)
        assert f"{tmp_path}/a/dest: another process is preparing it" in message
        assert names(tmp_path / "a") == [".dest.lock"]
        # Another destination is another matter.
        assert run(*options[:-1], tmp_path / "a" / "other") == 0
    assert run(*options) == 0
    assert names(tmp_path / "a") == ["dest", "other"]


def test_a_refused_preparation_leaves_no_directory(tmp_path, capsys):
    missing = tmp_path / "none.txt"
    options = ["--train", missing, "--valid", missing, "--test", missing]
    error_of(capsys, "text", *options, "--dest", tmp_path / "a" / "b" / "dest")
    assert names(tmp_path) == []


@pytest.mark.parametrize("corpus", ["data.text", "data.parallel", "data.strokes"])
def test_every_preparation_is_alone(tmp_path, monkeypatch, corpus):
    module = __import__(f"rhhn_fairseq.{corpus}.prepare", fromlist=["prepare"])
    seen = []

    def look(dest, *rest):
        seen.extend(names(dest.parent))
        raise UsageError("stop")

    monkeypatch.setattr(module, "check_replaceable", look)
    with pytest.raises(UsageError, match="stop"):
        module.prepare(None, dest=tmp_path / "dest", **_more(corpus))
    assert seen == [".dest.lock"] and names(tmp_path) == []


def _more(corpus):
    more = {"data.text": (), "data.parallel": ("cleaning", "pieces"), "data.strokes": ("cleaning",)}
    return dict.fromkeys(more[corpus])
