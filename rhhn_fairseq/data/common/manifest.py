"""``manifest.json``: what a prepared directory holds, from which input, made by which versions."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_json

MANIFEST_NAME = "manifest.json"
SPLITS = ("train", "valid", "test")
ADVICE = "prepare the corpus again with --force"

# What messages call each type if an entry has another one.
_WORDS = {dict: "an object", bool: "true or false", int: "a whole number", str: "a string"}


def load_manifest(data_dir: str | Path) -> object | None:
    """Returns the content of a directory's manifest, or None without a manifest. Raises UsageError."""
    try:
        return read_json(Path(data_dir) / MANIFEST_NAME, ADVICE)
    except FileNotFoundError:
        return None


@contextmanager
def intact(data_dir: str | Path) -> Iterator[None]:
    """Raises a one-line UsageError if an entry of a manifest turns out to be missing or of another type."""
    try:
        yield
    except UsageError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise UsageError(
            f"{Path(data_dir) / MANIFEST_NAME}: is not as it was written ({type(error).__name__}: {error}); "
            f"{ADVICE}"
        ) from error


def no_problem(manifest: dict) -> None:
    """The check of forms without their own: finds no problem."""


@dataclass(frozen=True)
class ManifestForm:
    """What the manifests of one kind of corpus have in common.

    Attributes:
        corpus: the kind of corpus in words, with its article.
        kind: the entry ``kind``; None for character corpora, whose manifests have no such entry.
        format: the entry ``format``. It is incremented when a change makes directories prepared earlier
            unreadable or different.
        types: the type of every entry that a reader relies on.
        check: returns what else is wrong with a manifest, or None.
        advice: what to do about a directory of another kind.
    """

    corpus: str
    kind: str | None
    format: int
    types: Mapping[str, type]
    check: Callable[[dict], str | None] = no_problem
    advice: str = ADVICE

    def read(self, data_dir: str | Path) -> dict | None:
        """Returns the manifest of a prepared directory, or None without one.

        Raises:
            UsageError: the file cannot be read, or is not a manifest of this form.
        """
        manifest = load_manifest(data_dir)
        if manifest is None:
            return None
        path = Path(data_dir) / MANIFEST_NAME
        if not isinstance(manifest, dict) or not manifest or manifest.get("kind") != self.kind:
            raise UsageError(f"{path}: is not the manifest of {self.corpus}; {self.advice}")
        if problem := self._problem(manifest):
            raise UsageError(f"{path}: {problem}; {ADVICE}")
        return manifest

    def _problem(self, manifest: dict) -> str | None:
        if manifest.get("format") != self.format:
            return f"has format {manifest.get('format')!r}, this version reads format {self.format}"
        for key, kind in self.types.items():
            if key not in manifest:
                return f"{key} is missing"
            if not isinstance(manifest[key], kind):
                return f"{key} is not {_WORDS[kind]}"
        return self.check(manifest)


def write_manifest(data_dir: Path, manifest: dict) -> None:
    """Writes ``manifest`` as readable JSON, ASCII only."""
    text = json.dumps(manifest, indent=2) + "\n"
    (Path(data_dir) / MANIFEST_NAME).write_text(text, encoding="ascii", newline="\n")


def check_request(dest: Path, prepared: dict, request: dict, identity: tuple[str, ...]) -> None:
    """Compares the input and options of a prepared directory with those of this request.

    Names of files do not matter, only their contents.

    Args:
        prepared: the ``request`` of the manifest at ``dest``. request: the current one.
        identity: the entries that identify an input.

    Raises:
        UsageError: they differ.
    """
    advice = "--force prepares it again; or choose another --dest"
    for key, now in request.items():
        before = prepared.get(key)
        if key == "inputs" or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            key = next(name for name in (*before, *now) if before.get(name) != now.get(name))
            before, now = before.get(key), now.get(key)
        raise UsageError(f"{dest}: was prepared with {key} {before!r}, not {now!r}; {advice}")
    before, now = prepared["inputs"], request["inputs"]
    if len(before) != len(now):
        raise UsageError(f"{dest}: was prepared from {len(before)} files, not {len(now)}; {advice}")
    for old, new in zip(before, now, strict=True):
        different = [key for key in identity if old[key] != new[key]]
        if different and "sha256" not in different:
            key = different[0]
            raise UsageError(f"{new['name']}: was prepared as {key} {old[key]}, not {new[key]}; {advice}")
        if different:
            raise UsageError(
                f"{new['name']}: SHA-256 {new['sha256'][:16]}… is not the one recorded in "
                f"{dest / MANIFEST_NAME}; {advice}"
            )


def installed_version(*distributions: str) -> str:
    """Returns the version of the first of these distributions that is installed, else "none"."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"
