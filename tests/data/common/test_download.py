"""Downloads of rhhn prepare, from a server on this machine."""

import functools
import http.server
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.chars_cli import (
    error_of,
    names,
)
from helpers.cli import HANGS

from rhhn_fairseq.data.common.download import default_download_dir, download
from rhhn_fairseq.data.text import corpora
from rhhn_fairseq.errors import UsageError


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """Serves ``data``; keeps the Range headers it got; may ignore ranges or stop early."""

    data = bytes(range(256)) * 4000
    ranges: list = []
    honour_range = True
    stop_after = None

    def do_GET(self):  # noqa: N802 (the name is http.server's)
        asked = self.headers.get("Range")
        self.ranges.append(asked)
        start = int(re.search(r"\d+", asked)[0]) if asked and self.honour_range else 0
        if self.path.startswith("/missing"):
            self.send_error(404)
            return
        if start >= len(self.data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked and self.honour_range else 200)
        if asked and self.honour_range:
            last = len(self.data) - 1
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(self.data)}")
        self.send_header("Content-Length", str(len(self.data) - start))
        self.end_headers()
        self.wfile.write(self.data[start : self.stop_after])

    def log_message(self, *arguments):
        """Keep the test's output clean."""


@pytest.fixture
def server():
    class Handler(RangeHandler):
        ranges = []

    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=functools.partial(http_server.serve_forever, 0.01))
    thread.start()
    yield Handler, f"http://127.0.0.1:{http_server.server_port}"
    http_server.shutdown()
    thread.join()
    http_server.server_close()


@pytest.mark.parametrize("honour_range", [True, False])
def test_download_continues_where_it_stopped(tmp_path, server, honour_range):
    handler, address = server
    handler.stop_after = 300_000
    with pytest.raises(UsageError, match="after 300,000 of 1,024,000 bytes; run the command again"):
        download(f"{address}/file", tmp_path)
    assert names(tmp_path) == ["file.part"]
    handler.stop_after = None
    handler.honour_range = honour_range
    assert download(f"{address}/file", tmp_path).read_bytes() == handler.data
    assert handler.ranges == [None, "bytes=300000-"]
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("honour_range", [True, False])
@pytest.mark.parametrize("extra", [0, 5])
def test_a_whole_or_too_long_part_is_settled(tmp_path, server, extra, honour_range):
    handler, address = server
    handler.honour_range = honour_range
    (tmp_path / "file.part").write_bytes(handler.data + bytes(extra))
    assert download(f"{address}/file", tmp_path).read_bytes() == handler.data


def test_a_server_that_continues_elsewhere_is_refused(tmp_path, server):
    handler, address = server
    (tmp_path / "file.part").write_bytes(handler.data[:300])

    def from_the_start(self):
        self.send_response(206)
        self.send_header("Content-Range", f"bytes 0-99/{len(self.data)}")
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(self.data[:100])

    handler.do_GET = from_the_start
    with pytest.raises(UsageError, match=r"asked for bytes from 300, got 'bytes 0-99/1024000'"):
        download(f"{address}/file", tmp_path)
    assert (tmp_path / "file.part").read_bytes() == handler.data[:300]


def test_download_errors_name_the_way_out(tmp_path, server, capsys, monkeypatch):
    _, address = server
    with pytest.raises(UsageError, match=r"missing \(Not Found\).*--from-dir"):
        download(f"{address}/missing", tmp_path)
    # Port 9 of the local host answers nobody.
    monkeypatch.setattr(corpora, "_ENWIK8_URL", "http://127.0.0.1:9/enwik8.zip")
    found = error_of(capsys, "enwik8", "--download-dir", tmp_path, "--dest", tmp_path / "dest")
    assert re.search(r"cannot download http://127.0.0.1:9/enwik8.zip .*--from-dir DIR", found)


def test_two_downloads_of_one_file(tmp_path, server, caplog):
    handler, address = server
    handler.stop_after, do_get, entered, leave = None, handler.do_GET, threading.Event(), threading.Event()

    def waits(self):
        entered.set()
        assert leave.wait(HANGS)
        do_get(self)

    handler.do_GET = waits
    with ThreadPoolExecutor(2) as workers:
        first = workers.submit(download, f"{address}/file", tmp_path)
        assert entered.wait(HANGS)
        second = workers.submit(download, f"{address}/file", tmp_path)
        try:
            deadline = time.monotonic() + HANGS
            while "another process is downloading" not in caplog.text and not second.done():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            leave.set()
        assert first.result() == second.result()
    assert first.result().read_bytes() == handler.data and handler.ranges == [None]


@pytest.mark.parametrize(
    "name, kind", [("a.zip", "zip archive"), ("a.tgz", "gzip file"), ("a.gz", "gzip file")]
)
def test_a_page_in_place_of_an_archive_is_removed(tmp_path, server, name, kind):
    handler, address = server
    handler.data = b"<html>please log in</html>"
    with pytest.raises(UsageError, match=f"{name}: what was downloaded is not a {kind}, and is removed"):
        download(f"{address}/{name}", tmp_path)
    assert names(tmp_path) == []


def test_downloads_are_kept_where_caches_are(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_download_dir() == Path("/caches/rhhn_fairseq")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_download_dir() == Path.home() / ".cache" / "rhhn_fairseq"


@pytest.mark.parametrize("plant", ["symlink_to", "hardlink_to"])
def test_a_planted_link_is_not_written_to(server, tmp_path, plant):
    victim, cache = tmp_path / "victim", tmp_path / "cache"
    victim.write_text("precious")
    cache.mkdir()
    getattr(cache / "file.bin.part", plant)(victim)
    assert download(f"{server[1]}/file.bin", cache).read_bytes() == RangeHandler.data
    assert victim.read_text() == "precious" and names(cache) == ["file.bin"]
