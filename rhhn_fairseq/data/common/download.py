"""Fetches the public corpora, continuing where an earlier attempt broke off."""

import http.client
import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from tqdm import tqdm

from rhhn_fairseq.errors import UsageError

TIMEOUT_SECONDS = 30
_BLOCK = 1 << 18


def default_download_dir() -> Path:
    """Returns where downloads are kept: $XDG_CACHE_HOME/rhhn_fairseq, else ~/.cache/rhhn_fairseq."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rhhn_fairseq"


def download(url: str, directory: Path, timeout: float = TIMEOUT_SECONDS, option: str = "--from-dir") -> Path:
    """Downloads ``url`` into ``directory`` unless it is already there; returns its path.

    The bytes go to NAME.part, which is renamed when complete; a NAME.part from an earlier attempt
    is continued with an HTTP Range request. Raises UsageError, naming ``option`` as the
    alternative, if the server cannot be reached, refuses, or stops early.
    """
    path = Path(directory) / url.rpartition("/")[2]
    if path.is_file():
        return path
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        total = _fetch(url, partial, timeout)
        if total is not None and partial.stat().st_size != total:
            raise UsageError(
                f"{url}: the connection ended after {partial.stat().st_size:,} of {total:,} bytes; "
                f"run the command again to continue, or pass {option} DIR with the files"
            )
        partial.replace(path)
    # URLError, time-outs and refused connections are OSErrors.
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(
            f"cannot download {url} ({reason}); get the files another way and pass {option} DIR"
        ) from error
    return path


def _fetch(url: str, partial: Path, timeout: float) -> int | None:
    """Fetches the rest of ``partial``; returns the total number of bytes, or None if it is unknown."""
    have = partial.stat().st_size if partial.exists() else 0
    headers = {"User-Agent": "rhhn_fairseq"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        # 416: nothing follows ``have``, so the file is complete, or it is a piece of another file.
        if error.code != 416:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return have
        partial.unlink()
        return _fetch(url, partial, timeout)
    with response:
        start = _first_byte(response, have)
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        progress = tqdm(
            desc=partial.stem, total=total, initial=start, unit="B", unit_scale=True, disable=None
        )
        with progress, partial.open("r+b" if start else "wb") as file:
            file.seek(start)
            while block := response.read(_BLOCK):
                file.write(block)
                progress.update(len(block))
    return total


def _first_byte(response, have: int) -> int:
    """Returns the offset of the response's first byte: ``have`` if the server continues, else 0."""
    content_range = response.headers.get("Content-Range") or ""
    match = re.match(r"bytes (\d+)-", content_range)
    if response.status != 206:
        return 0
    if not match or int(match[1]) != have:
        raise http.client.HTTPException(f"asked for bytes from {have}, got {content_range!r}")
    return have
