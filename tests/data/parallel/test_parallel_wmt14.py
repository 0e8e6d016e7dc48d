"""WMT 2014: archives as the shared task has them, made small; downloads from a server on this machine."""

import functools
import gzip
import hashlib
import http.server
import io
import re
import tarfile
import threading
from dataclasses import replace

import pytest
from helpers.parallel_cli import SMALL, error_of, lines_of, manifest_of, names, run, sentences

from rhhn_fairseq.data.common.sources import FileSource
from rhhn_fairseq.data.parallel import wmt14
from rhhn_fairseq.errors import UsageError

TRAINING = {
    "training-parallel-europarl-v7.tgz": ("training/europarl-v7.fr-en.{}", 0),
    "training-parallel-commoncrawl.tgz": ("commoncrawl.fr-en.{}", 60),
    "training-parallel-un.tgz": ("un/undoc.2000.fr-en.{}", 120),
    "training-parallel-nc-v9.tgz": ("training/news-commentary-v9.fr-en.{}", 180),
    "training-giga-fren.tar": ("giga-fren.release2.fixed.{}.gz", 240),
}
PARTS = ["europarl", "commoncrawl", "un", "news-commentary", "giga"]


def text(pairs, side) -> bytes:
    return "".join(f"{pair[side]}\n" for pair in pairs).encode()


def sgml(pairs, side, kind) -> bytes:
    """As in newstest2014-fren: a segment a line, entities for what SGML reserves."""
    segs = "".join(
        f'<seg id="{number}"> {pair[side].replace("&", "&amp;").replace("<", "&lt;")} </seg>\n'
        for number, pair in enumerate(pairs, start=1)
    )
    head = f'<{kind}set setid="newstest2014" srclang="any" trglang="fr">\n<doc docid="x" genre="news">\n'
    return f"{head}<hl>\n{segs}</hl>\n</doc>\n</{kind}set>\n".encode()


def write_tar(path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        folder = tarfile.TarInfo("training")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


TEST_PAIRS = [("R&D <now>", "R&D, l'été"), ("two", "deux"), ("", "vide")]


def write_archives(folder):
    """All seven archives, with other languages' files between."""
    for name, (member, first) in TRAINING.items():
        pairs = sentences(60, first)
        members = {member.format("de").replace("fr-en", "de-en"): b"ein\n" * 5}
        for side, language in ((1, "fr"), (0, "en")):
            data = text(pairs, side)
            members[member.format(language)] = gzip.compress(data) if member.endswith(".gz") else data
        write_tar(folder / name, members)
    dev = {}
    for year, first in ((2012, 1000), (2013, 1010)):
        for side, language in enumerate(("en", "fr")):
            dev[f"dev/newstest{year}.{language}"] = text(sentences(10, first), side)
            dev[f"dev/newstest{year}-src.{language}.sgm"] = sgml(sentences(10, first), side, "src")
    write_tar(folder / "dev.tgz", dev)
    write_tar(
        folder / "test-full.tgz",
        {
            "test-full/newstest2014-fren-src.en.sgm": sgml(TEST_PAIRS, 0, "src"),
            "test-full/newstest2014-fren-ref.fr.sgm": sgml(TEST_PAIRS, 1, "ref"),
            "test-full/newstest2014-deen-src.en.sgm": sgml([("other", "andere")], 0, "src"),
        },
    )


@pytest.fixture
def archives(tmp_path):
    folder = tmp_path / "archives"
    folder.mkdir()
    write_archives(folder)
    return folder


def prepare(*arguments):
    return ["wmt14-en-fr", *SMALL, *arguments]


def test_everything_is_read_from_its_archive(tmp_path, archives, capsys):
    dest = tmp_path / "dest"
    assert run(*prepare("--from-dir", archives, "--dest", dest, "--no-verify")) == 0
    manifest = manifest_of(dest)
    assert [part["name"] for part in manifest["cleaning"]] == PARTS
    assert [part["kept"] for part in manifest["cleaning"]] == [60] * 5
    valid = [*sentences(10, 1000), *sentences(10, 1010)]
    for side, language in enumerate(("en", "fr")):
        assert lines_of(dest / "raw" / f"valid.{language}") == [pair[side] for pair in valid]
        assert lines_of(dest / "raw" / f"test.{language}") == [pair[side] for pair in TEST_PAIRS]
    assert manifest["splits"]["valid"]["name"] == "newstest2012 + newstest2013"
    assert manifest["splits"]["test"]["name"] == "newstest2014"
    assert "giga" in capsys.readouterr().out
    inputs = {entry["name"]: entry["sha256"] for entry in manifest["request"]["inputs"]}
    found = inputs["training-giga-fren.tar:giga-fren.release2.fixed.fr.gz"]
    assert found == hashlib.sha256((archives / "training-giga-fren.tar").read_bytes()).hexdigest()


def test_the_development_sets_may_be_sgml_alone(tmp_path, archives):
    write_tar(
        archives / "dev.tgz",
        {
            f"dev/newstest{year}-{kind}.{language}.sgm": sgml([(f"{year} en", f"{year} fr")], side, kind)
            for year in (2012, 2013)
            for side, (kind, language) in enumerate((("src", "en"), ("ref", "fr")))
        },
    )
    corpus = wmt14.wmt14(["europarl"], archives, tmp_path, verify=False)
    assert [list(part.read()) for part in corpus.valid] == [
        [(b"2012 en", b"2012 fr")],
        [(b"2013 en", b"2013 fr")],
    ]


def damaged(path):
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (
            "training-parallel-un.tgz",
            lambda p: p.unlink(),
            "training-parallel-un.tgz: no such file; it is at http://",
        ),
        (
            "training-parallel-un.tgz",
            damaged,
            "un.tgz:undoc.2000.fr-en.en: is cut off or damaged",
        ),
        (
            "training-parallel-commoncrawl.tgz",
            lambda p: write_tar(p, {"commoncrawl.fr-en.en": b"a\nb\n", "commoncrawl.fr-en.fr": b"a\n"}),
            "commoncrawl.fr-en.en has 2 lines, but .*commoncrawl.fr-en.fr has 1",
        ),
    ],
)
def test_bad_archives_are_one_line(tmp_path, archives, capsys, name, spoil, message):
    spoil(archives / name)
    arguments = prepare("--from-dir", archives, "--dest", tmp_path / "dest", "--no-verify")
    found = error_of(capsys, *arguments)
    assert re.search(message, found), found
    assert names(tmp_path) == ["archives"]


def test_published_checksums_are_compared(tmp_path, archives, capsys):
    arguments = prepare("--from-dir", archives, "--dest", tmp_path / "dest")
    message = "europarl-v7.tgz: expected SHA-256 0224c7c7.*--no-verify"
    with pytest.raises(UsageError, match=message):
        wmt14.wmt14(PARTS, archives, tmp_path, verify=True)
    assert "expected SHA-256 0224c7c7" in error_of(capsys, *arguments)
    # Nothing is recorded in the user's own directory.
    assert names(archives) == sorted([*TRAINING, "dev.tgz", "test-full.tgz"])


@pytest.fixture
def server(archives):
    """Serves the archives below the shared task's folders; notes what was asked for."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path):
            asked.append(path)
            return str(archives / path.rpartition("/")[2])

        def log_message(self, *arguments):
            """Keep the test's output clean."""

    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=functools.partial(http_server.serve_forever, 0.01))
    thread.start()
    yield f"http://127.0.0.1:{http_server.server_port}/", asked
    http_server.shutdown()
    thread.join()
    http_server.server_close()


def test_archives_are_downloaded_once_and_remembered(tmp_path, server, archives, monkeypatch):
    address, asked = server
    monkeypatch.setattr(wmt14, "SERVER", address)
    for part, archive in wmt14.TRAINING.items():
        data = (archives / archive.path.rpartition("/")[2]).read_bytes()
        known = replace(archive, sha256=hashlib.sha256(data).hexdigest())
        monkeypatch.setitem(wmt14.TRAINING, part, known)
    kept = tmp_path / "kept"
    arguments = prepare("--download-dir", kept, "--dest", tmp_path / "dest")
    assert run(*arguments) == 0
    assert sorted(asked) == sorted(
        [
            "/wmt14/dev.tgz",
            "/wmt14/test-full.tgz",
            *(f"/{archive.path}" for archive in wmt14.TRAINING.values()),
        ]
    )
    records = ["dev.tgz.sha256", "test-full.tgz.sha256"]
    assert names(kept) == sorted([*TRAINING, "dev.tgz", "test-full.tgz", *records])
    expected = hashlib.sha256((archives / "dev.tgz").read_bytes()).hexdigest()
    assert (kept / "dev.tgz.sha256").read_text() == f"{expected}  dev.tgz\n"
    assert run(*arguments) == 0
    assert len(asked) == 7


def test_a_download_that_changed_since_is_noticed(tmp_path, server, archives, monkeypatch):
    monkeypatch.setattr(wmt14, "SERVER", server[0])
    known = wmt14.TRAINING["un"]
    monkeypatch.setitem(wmt14.TRAINING, "un", replace(known, sha256=None))
    kept = tmp_path / "kept"
    wmt14.wmt14(["un"], None, kept, verify=True)
    (kept / "test-full.tgz").write_bytes((archives / "dev.tgz").read_bytes())
    with pytest.raises(UsageError, match="test-full.tgz: expected SHA-256"):
        wmt14.wmt14(["un"], None, kept, verify=True)
    wmt14.wmt14(["un"], None, kept, verify=False)


def test_nothing_but_a_chunk_of_an_archive_is_in_memory(tmp_path):
    line = b"the same sentence again and again\n"
    data = gzip.compress(line * 400_000)
    write_tar(tmp_path / "big.tar", {"a/big.en.gz": data})
    chunks = FileSource(tmp_path / "big.tar", "big.en.gz").chunks()
    sizes = [len(chunk) for chunk in chunks]
    assert sum(sizes) == 400_000 * len(line)
    assert max(sizes) <= 1 << 20
