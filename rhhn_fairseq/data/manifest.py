"""``manifest.json``: what a prepared directory holds, from which input, made by which versions."""

import json
from pathlib import Path

from rhhn_fairseq.data.files import refuse_endless
from rhhn_fairseq.errors import UsageError

MANIFEST_NAME = "manifest.json"
DICTIONARY_NAME = "dict.txt"
SPLITS = ("train", "valid", "test")
MODES = ("text", "bytes")

# Counts up when a change makes directories prepared earlier unreadable or different.
FORMAT = 1


def read_manifest(data_dir: Path) -> dict | None:
    """The manifest of a prepared directory, or None where there is none.

    Raises UsageError where the file cannot be read or is not such a manifest.
    """
    path = Path(data_dir) / MANIFEST_NAME
    refuse_endless(path)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    # Both JSONDecodeError and UnicodeDecodeError are ValueErrors.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON ({error}); prepare the corpus again with --force") from error
    problem = _problem(manifest)
    if problem:
        raise UsageError(f"{path}: {problem}; prepare the corpus again with --force")
    return manifest


def _problem(manifest) -> str | None:
    if not isinstance(manifest, dict) or "format" not in manifest:
        return "is not the manifest of a character corpus"
    if manifest["format"] != FORMAT:
        return f"has format {manifest['format']!r}, this version reads format {FORMAT}"
    if manifest.get("mode") not in MODES:
        return f"mode is {manifest.get('mode')!r}, not one of {', '.join(MODES)}"
    if not isinstance(manifest.get("newline_occurs"), bool):
        return "newline_occurs is not true or false"
    if not isinstance(manifest.get("symbols"), int):
        return "symbols is not a whole number"
    if not isinstance(manifest.get("variant"), str):
        return "variant is not a sentence"
    for name in ("request", "files", "splits"):
        if not isinstance(manifest.get(name), dict):
            return f"{name} is missing"
    return None


def write_manifest(data_dir: Path, manifest: dict) -> None:
    """Write ``manifest`` as readable JSON, ASCII only."""
    text = json.dumps(manifest, indent=2) + "\n"
    (Path(data_dir) / MANIFEST_NAME).write_text(text, encoding="ascii", newline="\n")
