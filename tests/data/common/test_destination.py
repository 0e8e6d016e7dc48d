"""Directories that are prepared alone and replaced as a whole."""

from rhhn_fairseq.data.common.destination import one_at_a_time
from rhhn_fairseq.files import lock


@one_at_a_time
def prepare(corpus, dest):
    """Prepares nothing."""


def test_a_run_killed_after_it_replaced_a_directory_leaves_the_new_one(tmp_path):
    dest, old = tmp_path / "dest", tmp_path / f".dest.{'0' * 32}.old"
    for place, name in ((dest, "new"), (old, "old")):
        place.mkdir()
        (place / name).touch()
    prepare(None, dest)
    assert [path.name for path in tmp_path.iterdir()] == ["dest"]
    assert [path.name for path in dest.iterdir()] == ["new"]


def test_without_the_lock_nothing_is_removed(tmp_path):
    """On a file system without locks, another process may be at work."""
    stage = tmp_path / f".dest.{'0' * 32}.tmp"
    stage.mkdir()
    with lock(tmp_path / ".dest.lock", "held"):
        prepare(None, tmp_path / "dest")
        assert stage.is_dir()
    prepare(None, tmp_path / "dest")
    assert not stage.exists()
