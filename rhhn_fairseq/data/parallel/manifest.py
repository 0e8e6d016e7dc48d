"""``manifest.json`` of a prepared parallel corpus, and which files such a directory has."""

import re
from pathlib import Path

from rhhn_fairseq.data.common.manifest import MANIFEST_NAME, ManifestForm, load_manifest
from rhhn_fairseq.errors import UsageError

PARALLEL = ManifestForm(
    "a parallel corpus",
    kind="parallel",
    format=1,
    files=r"dict\.\w+\.txt|pieces\.(model|vocab)|(train|valid|test\d*)\.\w+-\w+\.\w+\.(bin|idx)"
    r"|raw/((valid|test\d*)\.\w+)?",
    identity=("split", "language", "sha256"),
)


def pieces_sha256(data_dir: str | Path) -> str | None:
    """Returns the SHA-256 of the pieces' model, 64 hexadecimal digits; None if it is not recorded.

    Raises:
        UsageError: there is a manifest, but it cannot be read or its entry is not a SHA-256.
    """
    manifest = load_manifest(data_dir)
    checksum = manifest.get("pieces_sha256") if isinstance(manifest, dict) else None
    if checksum is not None and not re.fullmatch("[0-9a-f]{64}", str(checksum)):
        path = Path(data_dir) / MANIFEST_NAME
        raise UsageError(f"{path}: pieces_sha256 is {checksum!r}, not 64 hexadecimal digits")
    return checksum
