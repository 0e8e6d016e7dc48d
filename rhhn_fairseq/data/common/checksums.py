"""Checks whether files are still as they were written."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from tqdm import tqdm

from rhhn_fairseq.errors import UsageError

logger = logging.getLogger(__name__)


def describe_file(path: Path) -> dict:
    """Returns size in bytes and SHA-256 of a file as it is stored. Raises OSError if it cannot be read."""
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


def check_files(directory: Path, sizes: Mapping[str, int], sums: Mapping[str, str]) -> None:
    """Compares files with the sizes and the SHA-256 that a manifest records.

    Older manifests of character corpora lack the sums; a warning then says that only sizes were compared.

    Raises:
        UsageError: a file is missing or has changed.
    """
    advice = "--force prepares it again"
    for name, size in sizes.items():
        path = directory / name
        if not path.is_file():
            raise UsageError(f"{path}: is missing, expected {size:,} bytes; {advice}")
        # The size is known at once, the checksum of a large file after a minute.
        actual = path.stat().st_size
        if actual != size:
            raise UsageError(f"{path}: has {actual:,} bytes, expected {size:,} bytes; {advice}")
        if name not in sums:
            continue
        sha256 = describe_file(path)["sha256"]
        if sha256 != sums[name]:
            raise UsageError(
                f"{path}: was changed (SHA-256 {sha256[:16]}…, recorded is {sums[name][:16]}…); {advice}"
            )
    if without := [name for name in sizes if name not in sums]:
        logger.warning(
            "%s: its manifest has no SHA-256 of %s, so only sizes were compared; %s and records them",
            directory,
            without[0] if len(without) == 1 else f"{len(without)} files",
            advice,
        )
