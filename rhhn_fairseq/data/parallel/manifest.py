"""``manifest.json`` of a prepared parallel corpus, and which files such a directory has."""

import json
import re
from pathlib import Path

from rhhn_fairseq.data.manifest import MANIFEST_NAME
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
    advice = "prepare the corpus again with --force"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    # Both JSONDecodeError and UnicodeDecodeError are ValueErrors.
    except ValueError as error:
        raise UsageError(f"{path}: is not JSON ({error}); {advice}") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise UsageError(f"{path}: is not the manifest of a parallel corpus; {advice}")
    if missing := [key for key in ("request", "files", "splits") if not isinstance(manifest.get(key), dict)]:
        raise UsageError(f"{path}: {missing[0]} is missing; {advice}")
    if manifest.get("format") != FORMAT:
        raise UsageError(
            f"{path}: has format {manifest.get('format')!r}, this version reads format {FORMAT}; {advice}"
        )
    return manifest
