"""``manifest.json``: what a prepared directory holds, from which input, made by which versions."""

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_json

MANIFEST_NAME = "manifest.json"
SPLITS = ("train", "valid", "test")
ADVICE = "prepare the corpus again with --force"


def load_manifest(data_dir: str | Path) -> object | None:
    """Returns the content of a directory's manifest, or None without a manifest. Raises UsageError."""
    try:
        return read_json(Path(data_dir) / MANIFEST_NAME, ADVICE)
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class ManifestForm:
    """What the manifests of one kind of corpus have in common.

    Attributes:
        corpus: the kind of corpus in words, with its article.
        kind: the entry ``kind``; None for character corpora, whose manifests have no such entry.
        format: the entry ``format``. It is incremented when a change makes directories prepared earlier
            unreadable or different.
    """

    corpus: str
    kind: str | None
    format: int

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
            raise UsageError(f"{path}: is not the manifest of {self.corpus}; {ADVICE}")
        if manifest.get("format") != self.format:
            raise UsageError(
                f"{path}: has format {manifest.get('format')!r}, this version reads format {self.format}; "
                f"{ADVICE}"
            )
        return manifest


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
