"""Creates a directory completely or not at all: one process fills it under another name and renames it."""

import functools
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rhhn_fairseq.data.common.manifest import (
    MANIFEST_NAME,
    ManifestForm,
    describe_file,
    versions,
    write_manifest,
)
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lock, readable


def check_replaceable(dest: Path, force: bool, form: ManifestForm) -> None:
    """Raises UsageError if ``dest`` exists and preparing a corpus must not replace it.

    A directory is replaced only if it holds nothing but the files of a prepared corpus of this form, and
    without a manifest that says what it is, only with ``force``. The current directory is not replaced.
    """
    dest = Path(os.path.realpath(dest))
    # For a path without access rights os.path returns False, where Path raises; making the
    # directory then says why.
    if not os.path.exists(dest):
        return
    if not os.path.isdir(dest):
        raise UsageError(f"{dest}: is a file; choose another --dest")
    with suppress(OSError):
        if Path.cwd().is_relative_to(dest):
            raise UsageError(
                f"{dest}: is the current directory or holds it, so it cannot be replaced; run this elsewhere"
            )
    with readable(str(dest)):
        present = [f"{path.name}/" if path.is_dir() else path.name for path in sorted(dest.iterdir())]
        folders = [name for name in present if name.endswith("/") and form.is_own(name)]
        present += [name + path.name for name in folders for path in sorted((dest / name).iterdir())]
    foreign = [name for name in present if not form.is_own(name)]
    if foreign:
        raise UsageError(
            f"{dest}: holds {foreign[0]!r}, which does not belong to a prepared corpus; choose another --dest"
        )
    if present and MANIFEST_NAME not in present and not force:
        raise UsageError(f"{dest}: holds files but no {MANIFEST_NAME}; --force replaces them")


def one_at_a_time(prepare: Callable) -> Callable:
    """Decorates a function ``prepare(corpus, dest, ...)`` to run alone, on ``dest`` with links followed.

    While it runs, it raises UsageError in every other process that is to prepare the same directory. Nothing
    is locked if the file system cannot be written.
    """

    @functools.wraps(prepare)
    def prepare_alone(corpus, dest, *args, **kwargs):
        dest = Path(os.path.realpath(dest))
        refusal = f"{dest}: another process is preparing it; wait for that one, or choose another --dest"
        with suppress(OSError):
            dest.parent.mkdir(parents=True, exist_ok=True)
        with lock(dest.with_name(f".{dest.name}.lock"), refusal) as alone:
            if alone:
                _clean_up(dest)
            return prepare(corpus, dest, *args, **kwargs)

    return prepare_alone


def _clean_up(dest: Path) -> None:
    """Removes what runs that were killed left beside ``dest``; a directory that was moved away comes back."""
    name = re.compile(rf"\.{re.escape(dest.name)}\.[0-9a-f]{{32}}\.(tmp|old)")
    with suppress(OSError):
        for left in [path for path in dest.parent.iterdir() if name.fullmatch(path.name)]:
            if left.suffix == ".old" and not os.path.lexists(dest):
                left.rename(dest)
            else:
                shutil.rmtree(left, ignore_errors=True)


def make_once(
    form: ManifestForm, dest: Path, request: dict, force: bool, packages: tuple[str, ...], build: Callable
) -> tuple[dict, bool]:
    """Makes a prepared directory unless it is there; returns its manifest, and whether it was there already.

    Args:
        request: what determines the result. force: make it again. packages: those whose versions matter.
        build: fills a new directory and returns the manifest's entries about the content.

    Raises:
        UsageError: ``dest`` was prepared from other input or with other options, or cannot be written.
    """
    if not force and (manifest := form.reusable(dest, request)) is not None:
        return manifest, True
    with staged(dest) as stage:
        manifest = {"format": form.format} | ({"kind": form.kind} if form.kind else {}) | build(stage)
        files = {path.name: describe_file(path) for path in sorted(stage.iterdir())}
        manifest |= {"request": request, "versions": versions(*packages)}
        manifest["files"] = {name: entry["bytes"] for name, entry in files.items()}
        manifest["sha256"] = {name: entry["sha256"] for name, entry in files.items()}
        write_manifest(stage, manifest)
    return manifest, False


@contextmanager
def staged(dest: Path) -> Iterator[Path]:
    """Yields a new directory next to ``dest`` that replaces it when the context ends without an error.

    After an exception, Ctrl-C or a full disk it is removed, and ``dest`` is as it was. Raises
    UsageError if the file system refuses.
    """
    stage = dest.with_name(f".{dest.name}.{uuid.uuid4().hex}.tmp")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir()
        yield stage
        publish(stage, dest)
    except OSError as error:
        raise UsageError(f"{dest}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(stage: Path, dest: Path) -> None:
    """Renames the directory ``stage`` to ``dest``, replacing an existing directory.

    Raises OSError if the file system refuses; then ``dest`` is as it was.
    """
    if not dest.exists():
        stage.rename(dest)
        return
    old = stage.with_suffix(".old")
    try:
        dest.rename(old)
        stage.rename(dest)
    finally:
        # After any error in between, exactly one of the two directories is left, at ``dest``.
        if old.exists():
            if dest.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(dest)
