"""Stages: done once, done again when anything changed, and never left half done."""

import json

import pytest
from helpers.parallel_cli import names

from rhhn_fairseq.data.parallel.stages import stages_in


class Work:
    """Runs two stages, of which the second copies the first's file, and notes what was done."""

    def __init__(self, tmp_path):
        self.directory = tmp_path / "deep" / "work"
        self.done = []

    def run(self, first="a", second="b"):
        """Results of both stages; keeps going from what an earlier call finished."""
        self.done = []
        with stages_in(self.directory, lambda text: None) as stages:
            results = [
                stages.run("first", {"text": first}, self._make("first", first)),
                stages.run("second", {"text": second}, self._make("second", second)),
            ]
            self.files = stages.files("second")
        return results

    def _make(self, name, text):
        def make(folder):
            self.done.append(name)
            (folder / "inner").mkdir()
            (folder / "inner" / "file").write_text(text)
            return {"length": len(text), "list": [1.5, None, True]}

        return make


@pytest.fixture
def work(tmp_path):
    return Work(tmp_path)


RESULT = {"length": 1, "list": [1.5, None, True]}


def test_finished_stages_are_not_done_again(work):
    assert work.run() == [RESULT, RESULT]
    assert work.done == ["first", "second"]
    assert work.files == {
        "inner/file": {
            "bytes": 1,
            "sha256": "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d",
        }
    }
    assert work.run() == [RESULT, RESULT]
    assert work.done == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("b"),
        lambda path: path.unlink(),
        lambda path: path.write_text("longer"),
    ],
)
def test_a_changed_file_repeats_its_stage(work, spoil):
    work.run()
    spoil(work.directory / "first" / "inner" / "file")
    work.run()
    # The stage's new record equals its old one, so the second still follows from it.
    assert work.done == ["first"]


@pytest.mark.parametrize("record", ["{", '{"request": {}, "files": 3}'])
def test_a_damaged_record_repeats_its_stage(work, record):
    work.run()
    (work.directory / "second.json").write_text(record)
    work.run()
    assert work.done == ["second"]


def test_remains_of_a_killed_run_are_swept_away(work):
    work.run()
    record = json.loads((work.directory / "second.json").read_text())
    (work.directory / "second.json").unlink()
    (work.directory / "second" / "stray").write_text("x")
    (work.directory / "second.0.tmp").mkdir()
    (work.directory / "second.0.tmp" / "stray").write_text("x")
    work.run()
    assert work.done == ["second"]
    assert json.loads((work.directory / "second.json").read_text()) == record
    assert names(work.directory) == ["first", "first.json", "second", "second.json"]
    assert names(work.directory / "second") == ["inner"]
