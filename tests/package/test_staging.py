"""The one writer and the one lock: nothing goes through a link, and a lock ends with its process."""

import errno
import fcntl
import logging
import os
from contextlib import nullcontext

import pytest
from helpers.chars_cli import error_of, names, run, write_splits
from helpers.in_process import char_lm, train
from helpers.lock_holder import holder

from rhhn_fairseq.data.parallel.stages import stages_in
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lock, replace_file


def test_a_second_process_is_refused(tmp_path):
    path = tmp_path / "lock"
    with holder(path):
        refused = pytest.raises(UsageError, match="^taken$")
        with refused, lock(path, "taken"):
            raise AssertionError("two processes have the lock")
    with lock(path, "taken"):
        assert names(tmp_path) == ["lock"]
    assert names(tmp_path) == []


def test_a_killed_process_holds_nothing(tmp_path):
    """Not even if a process that it forked, such as a data loader's, is still alive."""
    path = tmp_path / "lock"
    with holder(path, "fork") as first:
        first.kill()
        first.wait()
        assert path.exists()
        with lock(path, "taken"):
            pass
    assert names(tmp_path) == []


def test_a_process_may_take_its_own_lock_again(tmp_path):
    path = tmp_path / "lock"
    with lock(path, "taken"):
        with lock(path, "taken"):
            pass
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EROFS])
def test_without_locks_work_goes_on(tmp_path, monkeypatch, caplog, error):
    def refuse(*arguments):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.DEBUG, "rhhn_fairseq.files"), lock(tmp_path / "lock", "taken"):
        pass
    assert f"cannot be locked ({os.strerror(error)})" in caplog.text
    with lock(tmp_path / "missing" / "lock", "taken"):
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


@pytest.fixture
def victim(tmp_path):
    """A file of the user, which must never change."""
    path = tmp_path / "home" / "victim.json"
    path.parent.mkdir()
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious" and names(path.parent) == ["victim.json"]


@pytest.mark.parametrize("kind", ["link", "hard link", "directory"])
def test_a_lock_leaves_foreign_files_alone(tmp_path, victim, kind):
    path = tmp_path / "lock"
    plant = {"link": os.symlink, "hard link": os.link, "directory": lambda _, place: os.mkdir(place)}
    plant[kind](victim, path)
    refused = pytest.raises(UsageError, match=f"lock: is a {kind},")
    with nullcontext() if kind == "hard link" else refused, lock(path, "taken") as taken:
        assert taken


def test_a_link_is_followed_only_where_the_user_gave_the_name(tmp_path, victim):
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(victim)
    with replace_file(link, follow=False) as file:
        file.write(b"new")
    assert not link.is_symlink() and link.read_bytes() == b"new"
    link.unlink()
    link.symlink_to(target)
    with replace_file(link) as file:
        file.write(b"new")
    assert link.is_symlink() and target.read_bytes() == b"new"


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_stage_is_a_new_file(tmp_path, victim, monkeypatch, plant):
    """Even if its name is guessed, a file or a link of that name is not written to."""
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    plant(victim, tmp_path / ".name.guessed.tmp")
    with pytest.raises(UsageError, match="name: cannot be written"), replace_file(tmp_path / "name"):
        raise AssertionError("a planted file was opened")


def test_preparing_and_training_leave_planted_links_alone(tmp_path, victim, capsys):
    (tmp_path / ".dest.lock").symlink_to(victim)
    message = error_of(capsys, "text", *write_splits(tmp_path), "--dest", tmp_path / "dest")
    assert f"{tmp_path}/.dest.lock: is a link, expected a lock file" in message
    (tmp_path / ".dest.work").symlink_to(victim.parent)
    refused = pytest.raises(UsageError, match=r"\.dest\.work: is a link")
    with refused, stages_in(tmp_path / ".dest.work", print) as stages:
        stages.discard()
    (tmp_path / "run").mkdir()
    command = char_lm(tmp_path / "corpus", tmp_path / "run", "--max-update", 1)
    (tmp_path / "run" / ".training.lock").symlink_to(victim)
    with pytest.raises(UsageError, match=r"\.training\.lock: is a link"):
        train(*command)
    (tmp_path / "run" / ".training.lock").unlink()
    (tmp_path / "run" / "checkpoint_best.pt").symlink_to(victim)
    train(*(option for option in command if option != "--disable-validation"))
    assert names(tmp_path / "run") == ["checkpoint_best.pt", "checkpoint_last.pt"]
    assert not (tmp_path / "run" / "checkpoint_best.pt").is_symlink()


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
