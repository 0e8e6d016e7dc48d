"""rhhn prepare: Penn Treebank, enwik8 and the standard library's source."""

import gzip
import hashlib
import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from helpers.chars_cli import (
    SPLITS,
    contents,
    error_of,
    manifest_of,
    read_back,
    run,
    zip_of,
)

from rhhn_fairseq.data.text import corpora
from rhhn_fairseq.data.text.corpora import drop_outer_spaces
from rhhn_fairseq.data.text.vocabulary import CharVocabulary


def test_real_ptb(tmp_path, data_dir, capsys):
    dest = tmp_path / "ptb"
    arguments = ["ptb", "--from-dir", data_dir / "ptb", "--dest", dest]
    assert run(*arguments) == 0
    sentence = "PTB, word-level Mikolov files as raw characters, 50 symbols"
    assert capsys.readouterr().out.splitlines()[-1] == sentence
    vocabulary = CharVocabulary.load(dest)
    assert vocabulary.corpus == sentence
    assert len(vocabulary.model_indices()) == 50
    assert vocabulary.codes()[:3].tolist() == [ord("\n"), ord(" "), ord("e")]
    counts = manifest_of(dest)["splits"]
    assert [counts[split]["symbols"] for split in SPLITS] == [5_101_618, 399_782, 449_945]
    assert [counts[split]["items"] for split in SPLITS] == [42_068, 3_370, 3_761]
    assert all(counts[split]["unknown"] == 0 for split in SPLITS)
    for split in SPLITS:
        with gzip.open(data_dir / "ptb" / f"ptb.{split}.txt.gz") as file:
            assert read_back(dest, split).encode() == file.read()
    # fairseq's own reader sees the same lines.
    dictionary = Dictionary.load(str(dest / "dict.txt"))
    assert len(dictionary) == len(vocabulary) == 53
    dataset = data_utils.load_indexed_dataset(str(dest / "valid"), dictionary)
    with gzip.open(data_dir / "ptb" / "ptb.valid.txt.gz", "rt", encoding="utf-8") as file:
        lines = file.readlines()
    assert len(dataset) == len(lines)
    for item, line in zip(dataset, lines, strict=True):
        assert vocabulary.decode(item.numpy()) == line
    assert run(*arguments) == 0
    assert "already prepared" in capsys.readouterr().out


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_outer_spaces_are_dropped_in_chunks_of_any_size(size):
    text = "  a  b \n\n   \n c\nd \n  e   f  "
    codes = np.frombuffer(text.encode(), dtype=np.uint8)
    chunks = [codes[start : start + size] for start in range(0, len(codes), size)]
    kept = np.concatenate(list(drop_outer_spaces(chunks))).tobytes().decode()
    assert kept == "\n".join(line.strip(" ") for line in text.split("\n"))


def small_ptb(directory, stem="ptb.", text=" a b <unk> \n"):
    for split in SPLITS:
        (directory / f"{stem}{split}.txt").write_text(text)


def test_wrong_checksum_is_reported(tmp_path, capsys):
    small_ptb(tmp_path)
    (tmp_path / "ptb.train.txt").write_bytes(b"a" * 5_101_618)
    found = error_of(capsys, "ptb", "--from-dir", tmp_path, "--dest", tmp_path / "dest")
    assert "ptb.train.txt: expected MD5 f26c4b92c5fdc7b3f8c7cdcb991d8420 unpacked, found" in found


def test_ptb_in_simple_examples_tgz(tmp_path, capsys):
    with tarfile.open(tmp_path / "simple-examples.tgz", "w:gz") as archive:
        for split in SPLITS:
            for stem, text in (("ptb.", b" a b \n"), ("ptb.char.", b"a _ b\n"), ("my.ptb.", b"no\n")):
                entry = tarfile.TarInfo(f"./simple-examples/data/{stem}{split}.txt")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text))
    dest = tmp_path / "dest"
    arguments = ["ptb", "--from-dir", tmp_path, "--no-verify"]
    assert run(*arguments, "--dest", dest) == 0
    assert read_back(dest, "test") == " a b \n"
    assert run(*arguments, "--variant", "mikolov-char", "--dest", tmp_path / "char") == 0
    assert read_back(tmp_path / "char", "test") == "a_b\n"
    assert run(*arguments, "--variant", "char", "--dest", tmp_path / "same") == 0
    assert read_back(tmp_path / "same", "test") == "a b\n"
    assert "ptb.char files (no outer spaces" in CharVocabulary.load(tmp_path / "char").corpus
    checked = ["ptb", "--from-dir", tmp_path, "--variant", "mikolov-char", "--dest", tmp_path / "c"]
    assert "train split has 4 symbols, expected about 5,017,482" in error_of(capsys, *checked)


def test_an_ambiguous_or_damaged_archive_is_reported(tmp_path, capsys):
    arguments = ["ptb", "--from-dir", tmp_path, "--dest", tmp_path / "dest"]
    assert "has no ptb.train.txt, plain, packed" in error_of(capsys, *arguments)
    (tmp_path / "a.tgz").write_bytes(b"no archive")
    assert "a.tgz: is cut off or damaged" in error_of(capsys, *arguments)
    (tmp_path / "a.tgz").unlink()
    zip_of(tmp_path / "a.zip", **{"x/ptb.train.txt": "a", "y/ptb.train.txt": "b"})
    assert "has ptb.train.txt more than once" in error_of(capsys, *arguments)


def test_enwik8_is_bytes_and_cut_90_5_5(tmp_path, capsys):
    data = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8).tobytes()
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(data))
    dest = tmp_path / "dest"
    arguments = ["enwik8", "--from-dir", tmp_path, "--dest", dest]
    assert "expected MD5 a1fa5ffddb56f4953e226637dabbb36a unpacked, found" in error_of(capsys, *arguments)
    assert run(*arguments, "--no-verify") == 0
    pieces = [read_back(dest, split) for split in SPLITS]
    assert b"".join(pieces) == data
    assert [len(piece) for piece in pieces] == [9_000, 500, 500]
    manifest = manifest_of(dest)
    assert manifest["variant"] == "enwik8 as bytes, 90/5/5 split, 256 symbols"
    assert manifest["request"]["inputs"][0]["sha256"] == hashlib.sha256(data).hexdigest()
    assert "not UTF-8" in error_of(
        capsys, *arguments[:3], "--dest", tmp_path / "t", "--no-verify", "--no-bytes"
    )


def test_text8_is_cut_90_5_5(tmp_path, capsys):
    data = np.random.default_rng(0).choice(list(b" abcdefghijklmnopqrstuvwxyz"), 10_000).astype(np.uint8)
    zip_of(tmp_path / "text8.zip", text8=data.tobytes())
    dest = tmp_path / "dest"
    arguments = ["text8", "--from-dir", tmp_path, "--dest", dest]
    refusal = error_of(capsys, *arguments)
    assert "text8: expected MD5 3bea1919949baf155f99411df5fada7e" in refusal.replace(".zip", "")
    assert run(*arguments, "--no-verify") == 0
    pieces = [read_back(dest, split) for split in SPLITS]
    assert [len(piece) for piece in pieces] == [9_000, 500, 500]
    assert "".join(pieces).encode() == data.tobytes()
    assert manifest_of(dest)["variant"] == "text8, 90/5/5 split, 27 symbols"


@pytest.mark.parametrize("packed", [False, True])
def test_wikitext103_as_it_is_distributed(tmp_path, capsys, monkeypatch, packed):
    texts = {split: f" \n = Café {split} = \n \n A {split} line @-@ 中 . \n" for split in SPLITS}
    folder = "wikitext-103-raw"
    if packed:
        zip_of(
            tmp_path / "wikitext-103-raw-v1.zip",
            **{f"{folder}/wiki.{split}.raw": text for split, text in texts.items()},
        )
    for split in SPLITS:
        if not packed:
            (tmp_path / f"wiki.{split}.raw").write_text(texts[split], encoding="utf-8")
        (tmp_path / f"wiki.{split}.tokens").write_text(" = <unk> =\n", encoding="utf-8")
    arguments = ["wikitext103", "--from-dir", tmp_path, "--dest"]
    refusal = error_of(capsys, *arguments, tmp_path / "dest")
    assert "the train split has 4 items, expected about 1,801,350" in refusal and "--no-verify" in refusal
    assert not (tmp_path / "dest").exists()
    monkeypatch.setattr(corpora, "_WIKITEXT_LINES", dict.fromkeys(SPLITS, 4))
    assert run(*arguments, tmp_path / "dest") == 0
    assert [read_back(tmp_path / "dest", split) for split in SPLITS][:1] == [texts["train"]]
    assert manifest_of(tmp_path / "dest")["variant"].startswith("WikiText-103 raw as characters, ")
    assert run(*arguments, tmp_path / "bytes", "--bytes") == 0
    assert read_back(tmp_path / "bytes", "train") == texts["train"].encode()
    assert run(*arguments, tmp_path / "tokens", "--variant", "tokens", "--no-verify") == 0
    assert read_back(tmp_path / "tokens", "test") == " = <unk> =\n"


def test_stdlib_is_ascii_source_in_order_and_deterministic(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for dest in (first, second):
        assert run("stdlib", "--size", "200_000", "--dest", dest) == 0
    assert contents(first) == contents(second)
    counts = manifest_of(first)["splits"]
    assert [counts[split]["symbols"] for split in SPLITS] == [200_000, 10_000, 10_000]
    text = read_back(first, "train")
    assert text.isascii()
    assert text.startswith(Path(tempfile.__file__).with_name("__future__.py").read_text())
    assert "\ndef " in text


def test_stdlib_leaves_out_tests_generated_and_non_ascii_files(tmp_path):
    kept = {"a.py": "A = 1\n", "b/c.py": "C = 1\n", "untested.py": "U = 1\n"}
    left_out = ["test/x.py", "b/tests/x.py", "b/test_b.py", "site-packages/x.py", "idlelib/x.py"]
    left_out += ["lib2to3/x.py", "__pycache__/x.py", "_sysconfigdata_x.py", "encodings/x.py", "x.c"]
    for name, text in {**kept, **dict.fromkeys(left_out, "X = 1\n"), "e.py": "é\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert corpora._library_text(tmp_path, 1000).decode() == "".join(kept.values())
    assert corpora._library_text(tmp_path, 8).decode() == "A = 1\nC "


def test_real_ptb_without_outer_spaces(tmp_path, data_dir, capsys):
    dest = tmp_path / "ptb"
    assert run("ptb", "--variant", "char", "--from-dir", data_dir / "ptb", "--dest", dest) == 0
    sentence = "PTB char, word-level Mikolov files without the outer spaces of lines, 50 symbols"
    assert capsys.readouterr().out.splitlines()[-1] == sentence == CharVocabulary.load(dest).corpus
    manifest = manifest_of(dest)
    assert manifest["request"]["options"] == {"variant": "char"}
    counts = [manifest["splits"][split] for split in SPLITS]
    assert [entry["symbols"] for entry in counts] == [5_017_482, 393_042, 442_423]
    assert [entry["items"] for entry in counts] == [42_068, 3_370, 3_761]
    with gzip.open(data_dir / "ptb" / "ptb.test.txt.gz", "rt", encoding="utf-8") as file:
        assert read_back(dest, "test") == "".join(f"{line.strip()}\n" for line in file)
    again = ["ptb", "--from-dir", data_dir / "ptb", "--dest", dest]
    assert "was prepared with variant 'char', not 'raw'" in error_of(capsys, *again)
