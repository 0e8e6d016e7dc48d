"""``manifest.json``: what a prepared directory holds, from which input, made by which versions."""

import hashlib
import json
import logging
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from itertools import zip_longest
from pathlib import Path

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_json

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
SPLITS = ("train", "valid", "test")
ADVICE = "prepare the corpus again with --force"

# The packages that are installed under another name.
_DISTRIBUTIONS = {"fairseq": "fairseq-fixed", "rhhn_fairseq": "rhhn-fairseq"}


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
        files: a regular expression of the files besides the manifest that such a directory may have, as paths
            relative to it; a folder's path ends with a slash.
        identity: the entries that identify an input.
    """

    corpus: str
    kind: str | None
    format: int
    files: str
    identity: tuple[str, ...]

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

    def is_own(self, name: str) -> bool:
        """Whether a prepared directory may have this file or folder."""
        return name == MANIFEST_NAME or bool(re.fullmatch(self.files, name))

    def reusable(self, dest: Path, request: dict) -> dict | None:
        """Returns the manifest of a directory that this request would make again; None without a directory.

        Raises:
            UsageError: it was prepared from other input or with other options, or its files have changed.
        """
        manifest = self.read(dest)
        if manifest is not None:
            self._check_request(dest, manifest["request"], request)
            _check_files(dest, manifest)
        return manifest

    def _check_request(self, dest: Path, prepared: dict, request: dict) -> None:
        """Compares input and options; of files only the contents matter, not their names."""
        advice = "--force prepares it again; or choose another --dest"
        for key, now in request.items():
            before = prepared.get(key)
            if key == "inputs" or before == now:
                continue
            if isinstance(before, dict) and isinstance(now, dict):
                key = next(name for name in (*before, *now) if before.get(name) != now.get(name))
                before, now = before.get(key), now.get(key)
            raise UsageError(f"{dest}: was prepared with {key} {before!r}, not {now!r}; {advice}")
        for old, new in zip_longest(prepared["inputs"], request["inputs"], fillvalue={}):
            if any(old.get(key) != new.get(key) for key in self.identity):
                name = new.get("name") or old["name"]
                raise UsageError(f"{dest}: was prepared from other files, {name} differs; {advice}")


def describe_file(path: Path) -> dict:
    """Returns size in bytes and SHA-256 of a file as it is stored. Raises OSError if it cannot be read."""
    # The layers use the vocabulary, and need torch and numpy only.
    from tqdm import tqdm

    sha256 = hashlib.sha256()
    size = path.stat().st_size
    progress = tqdm(
        desc=f"checksum {path.name}", total=size, unit="B", unit_scale=True, disable=None, leave=False
    )
    with progress, path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
            progress.update(len(block))
    return {"bytes": size, "sha256": sha256.hexdigest()}


def _check_files(directory: Path, manifest: dict) -> None:
    """Raises UsageError for a file that is missing or not as the manifest says.

    Older manifests of character corpora lack the sums; a warning then says that only sizes were compared.
    """
    advice = "--force prepares it again"
    sums = manifest.get("sha256", {})
    for name, entry in manifest["files"].items():
        # Parallel corpora have size and sum in one entry.
        entry = entry if isinstance(entry, dict) else {"bytes": entry, "sha256": sums.get(name)}
        path = directory / name
        # The size is known at once, the checksum of a large file after a minute.
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise UsageError(f"{path}: is missing or has not the {entry['bytes']:,} bytes expected; {advice}")
        if entry["sha256"] and describe_file(path)["sha256"] != entry["sha256"]:
            raise UsageError(f"{path}: was changed since it was prepared; {advice}")
    if entry["sha256"] is None:
        logger.warning("%s: no SHA-256 is recorded, so only sizes were compared; %s", directory, advice)


def write_manifest(data_dir: Path, manifest: dict) -> None:
    """Writes ``manifest`` as readable JSON, ASCII only."""
    (data_dir / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", "ascii", newline="\n")


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python and of packages that determine a result; "none" if not installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(_DISTRIBUTIONS.get(package, package))
        except metadata.PackageNotFoundError:
            found[package] = "none"
    return found
