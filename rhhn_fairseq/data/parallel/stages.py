"""Runs work in stages, each once: an interrupted run resumes at its first unfinished stage.

A stage fills a folder. When it is done, NAME.json beside the folder records the request, the size and
SHA-256 of every file, and the result. A later run with the same request compares the files and reuses
the result. Every record holds the checksum of the one before, so a stage that changed is run again with
all that follow.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rhhn_fairseq.data.common.manifest import describe_file
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import replace_file


class Stages:
    """The stages below one directory, run in a fixed order."""

    def __init__(self, directory: Path, say: Callable[[str], None]):
        self.directory = directory
        self.say = say
        self._before = None

    def folder(self, name: str) -> Path:
        """Returns the folder with the files of a finished stage."""
        return self.directory / name

    def files(self, name: str) -> dict[str, dict]:
        """Returns size and SHA-256 of the files of a finished stage, by their paths in its folder."""
        return json.loads(self._record_path(name).read_text(encoding="utf-8"))["files"]

    def run(self, name: str, request: dict, make: Callable[[Path], dict]) -> dict:
        """Lets ``make`` fill an empty folder, unless an earlier run did; returns the result of ``make``.

        request: all that determines the result besides the stages before. It and ``make``'s result must
            survive a round trip through JSON unchanged.
        """
        request = {**request, "before": self._before}
        record = self._finished(name, request)
        if record is None:
            self.say(f"stage {name}")
            record = {"request": request, **self._make(name, make)}
            with replace_file(self._record_path(name), follow=False) as file:
                file.write(json.dumps(record, indent=1).encode())
        else:
            self.say(f"stage {name}: finished before")
        self._before = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        return record["result"]

    def discard(self) -> None:
        """Forgets all finished stages."""
        for record in self.directory.glob("*.json"):
            record.unlink()

    def _record_path(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _make(self, name: str, make: Callable[[Path], dict]) -> dict:
        self._record_path(name).unlink(missing_ok=True)
        shutil.rmtree(self.folder(name), ignore_errors=True)
        for left in self.directory.glob(f"{name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        # A process that outlives a killed run may still write where that run told it to.
        unfinished = self.directory / f"{name}.{uuid.uuid4().hex}.tmp"
        unfinished.mkdir()
        try:
            result = make(unfinished)
            files = {
                path.relative_to(unfinished).as_posix(): describe_file(path)
                for path in sorted(unfinished.rglob("*"))
                if path.is_file()
            }
            unfinished.rename(self.folder(name))
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return {"files": files, "result": result}

    def _finished(self, name: str, request: dict) -> dict | None:
        """Returns the record of the stage if it was done with this request and its files are unchanged."""
        try:
            record = json.loads(self._record_path(name).read_text(encoding="utf-8"))
            same = record["request"] == request and all(
                describe_file(self.folder(name) / path) == entry for path, entry in record["files"].items()
            )
        # A record or file that cannot be read for any reason is made again.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return record if same else None


def remove_unless_resumable(directory: Path, last: str | None = None) -> None:
    """Removes the directory of stages if no finished stage is recorded there.

    last: the stage whose folder is moved away when all are done. If it is recorded but its folder is gone,
        the directory is removed as well.
    """
    records = {path.name for path in directory.glob("*.json")}
    if not records or (f"{last}.json" in records and not (directory / last).exists()):
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def stages_in(directory: Path, say: Callable[[str], None]) -> Iterator[Stages]:
    """Yields the stages in ``directory``, which is removed at the end unless a finished stage is in it.

    Raises UsageError if the file system refuses. Only one process may be at work there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if directory.is_symlink():
            raise UsageError(f"{directory}: is a link, expected a directory; remove it")
        try:
            yield Stages(directory, say)
        finally:
            remove_unless_resumable(directory)
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written ({error.strerror or error})") from error
