"""Identifies the sentencepiece model that a prepared directory was encoded with."""

import re
from pathlib import Path

from rhhn_fairseq.data.common.manifest import MANIFEST_NAME, load_manifest
from rhhn_fairseq.errors import UsageError


def pieces_sha256(data_dir: str | Path) -> str | None:
    """Returns the SHA-256 of the pieces' model, 64 hexadecimal digits; None if it is not recorded.

    Raises:
        UsageError: there is a manifest, but it cannot be read or its entry is not a SHA-256.
    """
    path = Path(data_dir) / MANIFEST_NAME
    manifest = load_manifest(data_dir)
    checksum = manifest.get("pieces_sha256") if isinstance(manifest, dict) else None
    if checksum is not None and not re.fullmatch("[0-9a-f]{64}", str(checksum)):
        raise UsageError(f"{path}: pieces_sha256 is {checksum!r}, not 64 hexadecimal digits")
    return checksum
