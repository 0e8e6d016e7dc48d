"""rhhn prepare text: texts, checks, interruptions, memory."""

import gzip
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from helpers.chars_cli import (
    SCRIPT,
    SPLITS,
    contents,
    error_of,
    manifest_of,
    names,
    read_back,
    run,
    write_splits,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rhhn_fairseq.data.common import sources
from rhhn_fairseq.data.text import stream
from rhhn_fairseq.data.text.stream import LONGEST_ITEM
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.errors import UsageError


def test_text_files_give_fairseqs_items_dictionary_and_table(tmp_path, capsys):
    dest = tmp_path / "deep" / "dest"
    options = write_splits(tmp_path, train="a b\n\nb\\é\r\n", valid="b?\n", test="é\ta")
    assert run("text", *options, "--dest", dest) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["split", "symbols", "items", "unknown"],
        ["train", "10", "3", "0"],
        ["valid", "3", "1", "1"],
        ["test", "3", "1", "1"],
    ]
    assert lines[5] == "user text (train.txt; valid.txt; test.txt), 7 symbols"
    expected = b"b 2\n\\x0d 1\n\\x20 1\n\\\\ 1\na 1\n\xc3\xa9 1\n"
    assert (dest / "dict.txt").read_bytes() == expected
    dataset = data_utils.load_indexed_dataset(str(dest / "train"), dataset_impl="mmap")
    dictionary = Dictionary.load(str(dest / "dict.txt"))
    items = [[dictionary[index] for index in item] for item in dataset]
    assert items == [["a", "\\x20", "b", "</s>"], ["</s>"], ["b", "\\\\", "é", "\\x0d", "</s>"]]
    assert read_back(dest, "train") == "a b\n\nb\\é\r\n"
    assert read_back(dest, "valid") == "b\ufffd\n"
    assert read_back(dest, "test") == "é\ufffda"
    assert CharVocabulary.load(dest).corpus == lines[5]


characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
awkward = st.sampled_from("\n\r\t \\#\x85\u2028\ufeff😀é")
texts = st.text(st.one_of(awkward, characters), min_size=2, max_size=50)


@settings(deadline=None, max_examples=60)
@given(texts)
@example("no newline at the end")
@example("\n\n\n")
@example("\r\n\r\n")
@example("\ufeffwith a byte order mark\n")
@example("one\x85two\u2028three\u2029four\x0bfive\x0c\n")
@example("😀" * 70_000)
def test_text_round_trip(text):
    with tempfile.TemporaryDirectory() as directory:
        options = write_splits(directory, text, text[::-1], text)
        dest = Path(directory) / "dest"
        assert run("text", *options, "--dest", dest) == 0
        assert [read_back(dest, split) for split in SPLITS] == [text, text[::-1], text]
        manifest = manifest_of(dest)
        assert manifest["splits"]["train"]["symbols"] == len(text)
        assert manifest["symbols"] == len(set(text))
        assert manifest["newline_occurs"] == ("\n" in text)


@settings(deadline=None, max_examples=40)
@given(st.binary(min_size=2, max_size=300))
@example(bytes(range(256)) * 2)
def test_bytes_round_trip(data):
    with tempfile.TemporaryDirectory() as directory:
        options = write_splits(directory, data, data[::-1], data)
        dest = Path(directory) / "dest"
        assert run("text", *options, "--bytes", "--dest", dest) == 0
        assert [read_back(dest, split) for split in SPLITS] == [data, data[::-1], data]
        Dictionary.load(str(dest / "dict.txt"))
        assert (dest / "dict.txt").read_bytes().isascii()


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_errors_replace(tmp_path, capsys, monkeypatch, size):
    """What is not UTF-8 is read as Python's own decoder reads it, wherever a chunk ends."""
    monkeypatch.setattr(sources, "CHUNK", size)
    data = "aé€😀".encode() + b"\xff\xe2\x82b\xc3(\xf0\x9f\x98" + "é\n".encode() + b"\xed\xa0\x80\xe2\x82"
    options = ["text", *write_splits(tmp_path, data, data, b"ok\xff"), "--dest", tmp_path / "dest"]
    assert "is not UTF-8, so this is not text; --bytes takes any file" in error_of(capsys, *options)
    assert run(*options, "--errors", "replace") == 0
    assert read_back(tmp_path / "dest", "train") == data.decode("utf-8", "replace")
    assert "was prepared with errors 'replace', not None" in error_of(capsys, *options)
    assert run(*options, "--errors", "replace") == 0
    assert "no meaning with --bytes" in error_of(capsys, *options, "--errors", "replace", "--bytes")
    nul = ["text", *write_splits(tmp_path, b"a\0b"), "--dest", tmp_path / "nul", "--errors", "replace"]
    assert "is NUL, so this is not text" in error_of(capsys, *nul)


def test_text_without_newlines_streams_in_items(tmp_path):
    source = tmp_path / "text8"
    source.write_bytes(b"ab " * 100_000)
    dest = tmp_path / "dest"
    assert run("text", "--input", source, "--split", "80/10/10", "--dest", dest) == 0
    vocabulary = CharVocabulary.load(dest)
    assert not vocabulary.newline_occurs
    assert vocabulary.model_indices().tolist() == [4, 5, 6]
    dataset = data_utils.load_indexed_dataset(str(dest / "train"))
    assert [len(item) for item in dataset] == [LONGEST_ITEM] * 3 + [240_000 - 3 * LONGEST_ITEM]
    assert "".join(read_back(dest, split) for split in SPLITS).encode() == source.read_bytes()


def test_split_falls_between_characters(tmp_path):
    text = "é" * 101
    source = tmp_path / "t.txt"
    source.write_text(text, encoding="utf-8")
    dest = tmp_path / "dest"
    assert run("text", "--input", source, "--split", "50.5/24.5/25", "--dest", dest) == 0
    counts = [manifest_of(dest)["splits"][split]["symbols"] for split in SPLITS]
    assert counts == [51, 25, 25]
    assert "".join(read_back(dest, split) for split in SPLITS) == text


def test_packed_and_several_files_equal_the_plain_text(tmp_path):
    plain = tmp_path / "plain"
    text = "".join(f"line {number}\n" for number in range(1000)).encode()
    assert run("text", *write_splits(tmp_path, text), "--dest", plain) == 0
    (tmp_path / "first.gz").write_bytes(gzip.compress(text[:777]))
    with zipfile.ZipFile(tmp_path / "rest.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        archive.writestr("folder/rest.txt", text[777:])
    packed = tmp_path / "packed"
    options = write_splits(tmp_path, text)
    options[1:2] = [tmp_path / "first.gz", tmp_path / "rest.zip"]
    assert run("text", *options, "--dest", packed) == 0
    for name in ("dict.txt", "train.bin", "train.idx"):
        assert (plain / name).read_bytes() == (packed / name).read_bytes()


def test_same_request_is_reused_and_another_is_refused(tmp_path, capsys):
    options = write_splits(tmp_path)
    dest = tmp_path / "dest"
    assert run("text", *options, "--dest", dest) == 0
    before = contents(dest)
    stamp = (dest / "train.bin").stat().st_mtime_ns
    assert run("text", *options, "--dest", dest) == 0
    assert "already prepared" in capsys.readouterr().out
    assert (dest / "train.bin").stat().st_mtime_ns == stamp
    assert "mode 'text', not 'bytes'" in error_of(capsys, "text", *options, "--bytes", "--dest", dest)
    assert "with corpus 'text', not 'stdlib'" in error_of(capsys, "stdlib", "--dest", dest)
    more = error_of(capsys, "text", *options, options[1], "--dest", dest)
    assert "was prepared from other files, train.txt differs; --force" in more
    write_splits(tmp_path, valid="bab\n")
    changed = error_of(capsys, "text", *options, "--dest", dest)
    assert "was prepared from other files, valid.txt differs; --force" in changed
    assert contents(dest) == before
    write_splits(tmp_path)
    write_splits(tmp_path, valid="bab\n")
    assert run("text", *options, "--dest", dest, "--force") == 0
    assert read_back(dest, "valid") == "bab\n"
    assert names(tmp_path) == ["dest", "test.txt", "train.txt", "valid.txt"]


def test_a_change_that_keeps_the_size_is_found(tmp_path, capsys, caplog):
    options = ["text", *write_splits(tmp_path), "--dest", tmp_path / "dest"]
    assert run(*options) == 0
    path = tmp_path / "dest" / "train.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "train.bin: was changed since" in error_of(capsys, *options)
    # Earlier versions recorded sizes alone.
    manifest = manifest_of(tmp_path / "dest")
    del manifest["sha256"]
    (tmp_path / "dest" / "manifest.json").write_text(json.dumps(manifest))
    assert run(*options) == 0
    assert "no SHA-256 is recorded, so only sizes were compared; --force" in caplog.text
    path.write_bytes(content + content[:2])
    assert f"train.bin: is missing or has not the {len(content)} bytes expected" in error_of(capsys, *options)
    assert run(*options, "--force") == 0
    assert path.read_bytes() == content
    assert len(manifest_of(tmp_path / "dest")["sha256"]) == 7


def test_vocabulary_notices_a_foreign_manifest(tmp_path):
    dest = tmp_path / "dest"
    assert run("text", *write_splits(tmp_path), "--dest", dest) == 0
    with (dest / "dict.txt").open("a") as file:
        file.write("z 1\n")
    with pytest.raises(UsageError, match="has 5 symbols, but manifest.json says 4"):
        CharVocabulary.load(dest)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left")])
def test_an_interrupted_run_leaves_everything_as_it_was(tmp_path, capsys, monkeypatch, existing, error):
    options = write_splits(tmp_path)
    dest = tmp_path / "dest"
    if existing:
        assert run("text", *options, "--dest", dest) == 0
    before = {path.name: contents(path) for path in tmp_path.iterdir() if path.is_dir()}

    def interrupt(*arguments):
        raise error

    monkeypatch.setattr(stream.StreamWriter, "_finish", interrupt)
    arguments = ["text", *options, "--dest", dest, "--force"]
    capsys.readouterr()
    if error is KeyboardInterrupt:
        assert run(*arguments) == 130
        assert capsys.readouterr().err == "error: interrupted; nothing was prepared\n"
    else:
        assert "dest: cannot be written (No space left)" in error_of(capsys, *arguments)
    assert {path.name: contents(path) for path in tmp_path.iterdir() if path.is_dir()} == before


def test_an_interruption_while_replacing_restores_the_old_corpus(tmp_path, monkeypatch):
    options = write_splits(tmp_path)
    dest = tmp_path / "dest"
    assert run("text", *options, "--dest", dest) == 0
    before = contents(dest)
    rename = Path.rename

    def interrupted_rename(self, target):
        if self.suffix == ".tmp":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted_rename)
    assert run("text", *options, "--dest", dest, "--force") == 130
    assert contents(dest) == before
    assert names(tmp_path) == ["dest", "test.txt", "train.txt", "valid.txt"]


def test_what_a_killed_run_left_is_cleaned_up(tmp_path, capsys):
    options = write_splits(tmp_path)
    dest = tmp_path / "dest"
    assert run("text", *options, "--dest", dest) == 0
    before = contents(dest)
    # Killed while it wrote, and killed between the two renames of a replacement.
    (tmp_path / f".dest.{'0' * 32}.tmp").mkdir()
    dest.rename(tmp_path / f".dest.{'1' * 32}.old")
    (tmp_path / ".dest.mine.tmp").mkdir()
    capsys.readouterr()
    assert run("text", *options, "--dest", dest) == 0
    assert "already prepared" in capsys.readouterr().out and contents(dest) == before
    assert names(tmp_path) == [".dest.mine.tmp", "dest", "test.txt", "train.txt", "valid.txt"]


PEAK = """
import re, runpy, sys
script = runpy.run_path(sys.argv[1])
# getrusage would count the memory of the process that started this one.
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
script["main"](sys.argv[2:])
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_text(tmp_path):
    source = tmp_path / "source"
    # One line.
    megabyte = b"abcdefghijklmnopqrstuvwxyz " * 37_000
    with source.open("wb") as file:
        for _ in range(30):
            file.write(megabyte)
    command = [sys.executable, "-c", PEAK, str(SCRIPT), "text", "--input", str(source)]
    result = subprocess.run(
        [*command, "--split", "90/5/5", "--dest", str(tmp_path / "dest")],
        capture_output=True,
        text=True,
        check=True,
    )
    kibibytes = int(result.stdout.split()[-1])
    # 35 to 70 MB measured, at 30 MB of text and at 100 MB alike; with the whole text in memory its
    # dictionary indices alone would take 240 MB, eight bytes a symbol.
    assert kibibytes < 120 * 1024


def test_preparing_needs_no_fairseq(tmp_path):
    code = (
        "import sys, runpy; main = runpy.run_path(sys.argv[1])['main']; main(sys.argv[2:]);"
        "assert not {'fairseq', 'torch'} & set(sys.modules)"
    )
    options = write_splits(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", code, SCRIPT, "text", *options, "--dest", tmp_path / "dest"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_current_directory_is_not_replaced(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("some text " * 50)
    (tmp_path / "data" / "inner").mkdir(parents=True)
    for place, dest in (("data", "."), ("data/inner", "..")):
        monkeypatch.chdir(tmp_path / place)
        options = ["--input", tmp_path / "text", "--split", "80/10/10"]
        message = error_of(capsys, "text", *options, "--dest", dest)
        assert f"{tmp_path / 'data'}: is the current directory or holds it" in message
        assert (tmp_path / "data" / "inner").is_dir()
