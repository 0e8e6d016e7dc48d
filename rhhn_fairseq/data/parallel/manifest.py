"""``manifest.json`` of a prepared parallel corpus, and which files such a directory has."""

import re
from pathlib import Path

from rhhn_fairseq.data.manifest import ADVICE, MANIFEST_NAME, load_manifest
from rhhn_fairseq.errors import UsageError

KIND = "parallel"

# Counts up when a change makes directories prepared earlier unreadable or different.
FORMAT = 1

_OWN = re.compile(
    r"dict\.\w+\.txt|pieces\.(model|vocab)|(train|valid|test\d*)\.\w+-\w+\.\w+\.(bin|idx)|raw/((valid|test\d*)\.\w+)?"
)


def is_parallel_file(name: str) -> bool:
    """Whether a prepared parallel corpus may have this file, a path relative to its directory."""
    return bool(_OWN.fullmatch(name))


def read_parallel_manifest(data_dir: Path) -> dict | None:
    """The manifest of a prepared parallel corpus, or None where there is none.

    Raises UsageError where the file cannot be read or is not such a manifest.
    """
    path = Path(data_dir) / MANIFEST_NAME
    manifest = load_manifest(data_dir)
    if manifest is None:
        return None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise UsageError(f"{path}: is not the manifest of a parallel corpus; {ADVICE}")
    if missing := [key for key in ("request", "files", "splits") if not isinstance(manifest.get(key), dict)]:
        raise UsageError(f"{path}: {missing[0]} is missing; {ADVICE}")
    if manifest.get("format") != FORMAT:
        raise UsageError(
            f"{path}: has format {manifest.get('format')!r}, this version reads format {FORMAT}; {ADVICE}"
        )
    return manifest
