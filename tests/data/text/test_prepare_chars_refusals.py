"""What rhhn prepare refuses: files, splits and command lines, each in one line."""

import gzip
import itertools
import os
import re

import pytest
from helpers.chars_cli import SPLITS, error_of, names, write_splits, zip_of


def spoiled_zip(path):
    """A .zip whose member's bytes do not fit its checksum."""
    zip_of(path, a="a" * 100)
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"abab"))


BAD_FILES = [
    (lambda p: os.mkfifo(p), "no such file; directories and pipes"),
    (lambda p: p.write_bytes(b""), "is empty"),
    (lambda p: p.write_bytes(b"abc\0"), "byte 3 is NUL.*--bytes"),
    (lambda p: p.write_bytes(b"ab\xe9\n"), "byte 2 is not UTF-8.*--bytes"),
    (lambda p: p.write_bytes(b"a"), r"has fewer than 2 symbols \(1\)"),
]
BAD_ARCHIVES = [
    ("t.gz", lambda p: p.write_bytes(gzip.compress(b"a" * 1000)[:-9]), "cut off or damaged"),
    ("t.zip", lambda p: zip_of(p, a="a", b="b"), "holds several files"),
    ("t.zip", lambda p: spoiled_zip(p), "cut off or damaged"),
    ("t.tgz", lambda p: p.write_bytes(b"a"), "is an archive; unpack it first"),
]


BAD_INPUTS = [("t.txt", *case) for case in BAD_FILES] + BAD_ARCHIVES


@pytest.mark.parametrize(
    ("split", "name", "make", "message"),
    # All splits are read by the same code.
    [(split, *case) for split, case in zip(itertools.cycle(SPLITS), BAD_INPUTS, strict=False)],
)
def test_bad_input_files(tmp_path, capsys, split, name, make, message):
    options = write_splits(tmp_path)
    bad = tmp_path / name
    make(bad)
    options[options.index(f"--{split}") + 1] = bad
    found = error_of(capsys, "text", *options, "--dest", tmp_path / "dest")
    assert re.search(message, found), found
    assert str(bad) in found or f"the {split} split" in found
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize(
    "split",
    ["90/5", "90/5/4", "100/0/0", "110/-5/-5", "a/b/c", "9e1/5/5"],
)
def test_bad_splits(tmp_path, capsys, split):
    (tmp_path / "t.txt").write_text("text " * 100)
    found = error_of(capsys, "text", "--input", tmp_path / "t.txt", "--split", split)
    assert f"--split {split!r}" in found and "such as 90/5/5" in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text"], "--train, --valid, --test: missing"),
        (["stdlib", "--size", "39"], r"the valid split has fewer than 2 symbols \(1\)"),
        (["stdlib", "--size", "100", "--dest", "x" * 300], "File name too long"),
    ],
)
def test_bad_command_lines(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert re.search(message, error_of(capsys, *arguments))
    assert names(tmp_path) in ([], ["data-bin"])
    assert not (tmp_path / "data-bin" / "stdlib").exists()
