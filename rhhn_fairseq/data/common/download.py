"""Fetches the public corpora, continuing where an earlier attempt broke off."""

import gzip
import hashlib
import http.client
import os
import stat
import urllib.error
import urllib.request
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import lock, no_link

TIMEOUT_SECONDS = 30
_BLOCK = 1 << 18


def default_download_dir() -> Path:
    """Returns where downloads are kept: $XDG_CACHE_HOME/rhhn_fairseq, else ~/.cache/rhhn_fairseq."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "rhhn_fairseq"


def download(url: str, directory: Path, option: str = "--from-dir", md5: str | None = None) -> Path:
    """Downloads ``url`` into ``directory`` unless it is already there; returns its path.

    The bytes go to NAME.part, which is renamed when complete; a NAME.part from an earlier attempt
    is continued with an HTTP Range request. Other processes that download to the directory wait.

    Args:
        option: the alternative that messages name.
        md5: of the content of a .gz, which is compared.

    Raises:
        UsageError: the server cannot be reached, refuses, stops early, or sends another file.
    """
    path = Path(directory) / url.rpartition("/")[2]
    # For a path without access rights os.path returns False, where Path raises; making the directory then
    # says why.
    if os.path.isfile(path):
        return path
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"{path.parent}: another process is downloading to it; waiting for that one"
        with lock(path.parent / ".lock", waiting, wait=True):
            if path.is_file():
                return path
            total = _fetch(url, partial)
            if total is not None and partial.stat().st_size != total:
                raise UsageError(
                    f"{url}: the connection ended after {partial.stat().st_size:,} of {total:,} bytes; "
                    f"run the command again to continue, or pass {option} DIR with the files"
                )
            if fault := _fault(path.name, partial, md5):
                partial.unlink()
                raise UsageError(
                    f"{url}: what was downloaded {fault}, and is removed; get the files another way and pass "
                    f"{option} DIR"
                )
            partial.replace(path)
    # URLError, time-outs and refused connections are OSErrors.
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(
            f"cannot download {url} ({reason}); get the files another way and pass {option} DIR"
        ) from error
    return path


def _fault(name: str, path: Path, md5: str | None) -> str | None:
    """Returns why the file is not of its name's kind, or not the one with that MD5; None if it is.

    Networks that ask for a login answer with a page instead of the file.
    """
    if name.endswith(".zip") and not zipfile.is_zipfile(path):
        return "is not a zip archive"
    if name.endswith((".gz", ".tgz")) and path.open("rb").read(2) != b"\x1f\x8b":
        return "is not a gzip file"
    if md5:
        try:
            with gzip.open(path) as file:
                found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        except (OSError, EOFError, zlib.error) as error:
            return f"is damaged ({error})"
        if found != md5:
            return f"is not the published file (its MD5 is {found}, not {md5})"
    return None


def _size_of_partial(partial: Path) -> int:
    """Returns the number of bytes from an earlier attempt; removes what is no file of a single name."""
    with suppress(FileNotFoundError):
        status = os.lstat(partial)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return status.st_size
        partial.unlink()
    return 0


def _fetch(url: str, partial: Path) -> int | None:
    """Fetches the rest of ``partial``; returns the total number of bytes, or None if it is unknown."""
    have = _size_of_partial(partial)
    headers = {"User-Agent": "rhhn_fairseq"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        # 416: nothing follows ``have``, so the file is complete, or it is a piece of another file.
        if error.code != 416:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return have
        partial.unlink()
        return _fetch(url, partial)
    with response:
        start = 0
        if response.status == 206:
            start, content_range = have, response.headers.get("Content-Range") or ""
            if not content_range.startswith(f"bytes {have}-"):
                raise http.client.HTTPException(f"asked for bytes from {have}, got {content_range!r}")
        length = response.headers.get("Content-Length")
        total = start + int(length) if length else None
        progress = tqdm(
            desc=partial.stem, total=total, initial=start, unit="B", unit_scale=True, disable=None
        )
        with progress, open(partial, "r+b" if start else "wb", opener=no_link) as file:
            file.seek(start)
            while block := response.read(_BLOCK):
                file.write(block)
                progress.update(len(block))
    return total
