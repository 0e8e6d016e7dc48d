"""rhhn prepare from the command line: results, refusals, bad input, full disks."""

import gzip
import hashlib
import re
import shutil
import subprocess
import sys

import pytest
from fairseq.data import Dictionary, data_utils
from helpers.cli import run_module
from helpers.parallel_cli import (
    SMALL,
    SPLITS,
    contents,
    error_of,
    lines_of,
    manifest_of,
    names,
    run,
    script,
    sentences,
    write_files,
)

from rhhn_fairseq.data.parallel.pieces import load_pieces

FILES = [
    "dict.en.txt",
    "dict.fr.txt",
    "manifest.json",
    "pieces.model",
    "pieces.vocab",
    "raw",
    *sorted(
        f"{split}.en-fr.{language}.{kind}"
        for split in ("test", "train", "valid")
        for language in ("en", "fr")
        for kind in ("bin", "idx")
    ),
]


def test_the_directory_is_what_fairseq_and_scoring_read(tmp_path, capsys):
    long = [("word " * 70_000, "mot"), ("", "")]
    options = write_files(tmp_path, test=[*sentences(7, 2000), *long])
    dest = tmp_path / "deep" / "a, b" / "dest"
    assert run("files", *options, "--vocab-size", 60, "--workers", 2, "--dest", dest) == 0
    output = capsys.readouterr().out
    assert names(dest) == FILES
    assert names(dest.parent) == ["dest"]

    dictionary = Dictionary.load(str(dest / "dict.en.txt"))
    assert len(dictionary) == 60
    assert dictionary == Dictionary.load(str(dest / "dict.fr.txt"))
    processor = load_pieces(dest)
    assert processor.vocab_size() == 59
    for split in SPLITS:
        for language in ("en", "fr"):
            dataset = data_utils.load_indexed_dataset(str(dest / f"{split}.en-fr.{language}"), dictionary)
            texts = lines_of(tmp_path / f"{split}.{language}")
            assert [[dictionary[index] for index in item] for item in dataset] == [
                [*processor.encode(text, out_type=str), "</s>"] for text in texts
            ]
            encoded = [" ".join(processor.encode(text, out_type=str)) for text in texts]
            (tmp_path / f"pieces.{split}.{language}").write_text("".join(f"{line}\n" for line in encoded))
            if split != "train":
                assert (dest / "raw" / f"{split}.{language}").read_bytes() == (
                    tmp_path / f"{split}.{language}"
                ).read_bytes()
    # fairseq's own program writes the same files.
    prefixes = [f"--{split}pref={tmp_path}/pieces.{split}" for split in SPLITS]
    command = ["--source-lang=en", "--target-lang=fr", "--joined-dictionary", f"--srcdict={dest}/dict.en.txt"]
    run_module("fairseq_cli.preprocess", [*command, *prefixes, f"--destdir={tmp_path}/fairseq"])
    written = contents(tmp_path / "fairseq")
    del written["preprocess.log"]
    assert written.items() <= contents(dest).items() and len(written) == 14

    manifest = manifest_of(dest)
    assert (manifest["kind"], manifest["source_lang"], manifest["target_lang"]) == ("parallel", "en", "fr")
    model = (dest / "pieces.model").read_bytes()
    assert manifest["pieces_sha256"] == hashlib.sha256(model).hexdigest()
    for name, entry in manifest["files"].items():
        data = (dest / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert set(manifest["files"]) == set(contents(dest))
    assert {entry["name"] for entry in manifest["request"]["inputs"]} >= {"train.en", "test.fr"}
    assert re.search(r"^train\.en +200 +200 +0 +0 +0 +0 +0$", output, re.M)
    assert re.search(r"^test +fr +9 +\d+ +\d+ +1  test\.en$", output, re.M)


def test_a_text_too_small_for_the_vocabulary_has_the_largest_that_fits(tmp_path, capsys):
    command = ["files", *write_files(tmp_path), "--workers", 1]
    dest = tmp_path / "dest"
    assert run(*command, "--dest", dest) == 0
    size = len(Dictionary.load(str(dest / "dict.en.txt")))
    said = capsys.readouterr().out
    assert f"\n--vocab-size 32000: the text is too small for it, {size} is taken\n" in said
    assert 60 < size == manifest_of(dest)["vocab_size"] < 32_000
    # It fits exactly, and one entry more does not.
    for wanted, taken in ((size, False), (size + 1, True)):
        assert run(*command, "--vocab-size", wanted, "--dest", tmp_path / str(wanted)) == 0
        assert ("is taken" in capsys.readouterr().out) == taken
    # The request is what was asked for.
    assert run(*command, "--dest", dest) == 0
    assert "already prepared" in capsys.readouterr().out


def test_languages_and_several_test_sets(tmp_path):
    options = write_files(tmp_path)
    (tmp_path / "more.de").write_text("a man\n")
    (tmp_path / "more.x1").write_text("un homme\n")
    options[options.index("--test-src") + 2 : options.index("--test-src") + 2] = [tmp_path / "more.de"]
    options += [tmp_path / "more.x1"]
    dest = tmp_path / "dest"
    arguments = [*options, *SMALL, "--source-lang", "de", "--target-lang", "x1", "--dest", dest]
    assert run("files", *arguments) == 0
    assert {"dict.de.txt", "test1.de-x1.x1.bin", "train.de-x1.de.idx"} <= set(names(dest))
    assert lines_of(dest / "raw" / "test1.x1") == ["un homme"]
    assert manifest_of(dest)["splits"]["test1"]["languages"]["de"]["sentences"] == 1
    # All of these files are its own, so the directory may be replaced.
    assert run("files", *arguments, "--force") == 0


def test_the_same_request_is_reused_and_another_is_refused(tmp_path, capsys):
    options = write_files(tmp_path)
    dest = tmp_path / "dest"
    command = ["files", *options, "--dest", dest]
    assert run(*command, *SMALL) == 0
    before = contents(dest)
    stamp = (dest / "manifest.json").stat().st_mtime_ns
    capsys.readouterr()
    # Processes are no part of the request, nor are the names of files.
    # A run that was killed while it removed its finished stages.
    (tmp_path / ".dest.work" / "texts").mkdir(parents=True)
    renamed = [str(option).replace("train.en", "renamed.en") for option in command]
    shutil.copy(tmp_path / "train.en", tmp_path / "renamed.en")
    assert run(*renamed, *SMALL[:2], "--workers", "2") == 0
    assert capsys.readouterr().out.startswith("already prepared: ")
    assert (dest / "manifest.json").stat().st_mtime_ns == stamp
    for more, message in (
        (["--vocab-size", "61"], "was prepared with vocab_size 60, not 61; --force"),
        ([*SMALL, "--max-ratio", "3"], "was prepared with max_ratio 2.5, not 3.0; --force"),
        ([*SMALL, "--keep-duplicates"], "with keep_duplicates False, not True"),
        ([*SMALL, "--target-lang", "de"], r"languages \['en', 'fr'\], not \['en', 'de'\]"),
    ):
        assert re.search(message, error_of(capsys, *command, *more))
    write_files(tmp_path, valid=sentences(5, 1001))
    assert "prepared from other files, valid.en differs; --force" in error_of(capsys, *command, *SMALL)
    assert contents(dest) == before
    assert run(*command, *SMALL, "--force") == 0
    assert lines_of(dest / "raw" / "valid.en") == lines_of(tmp_path / "valid.en")
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def test_a_damaged_destination_is_found_and_force_mends_it(tmp_path, capsys):
    options = write_files(tmp_path)
    dest = tmp_path / "dest"
    command = ["files", *options, *SMALL, "--dest", dest]
    assert run(*command) == 0
    before = contents(dest)
    content = (dest / "raw/test.fr").read_bytes()
    (dest / "raw/test.fr").write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    assert "raw/test.fr: was changed" in error_of(capsys, *command)
    (dest / "raw" / "test.fr").unlink()
    assert "raw/test.fr: is missing or" in error_of(capsys, *command)
    for text, message in (
        ("{", "is not JSON"),
        ("{}", "is not the manifest of a parallel corpus"),
        ('{"kind": "parallel", "request": {}, "splits": {}, "files": {}, "format": 9}', "has format 9"),
    ):
        (dest / "manifest.json").write_text(text)
        assert message in error_of(capsys, *command)
    (dest / "manifest.json").unlink()
    assert "holds files but no manifest.json" in error_of(capsys, *command)
    assert run(*command, "--force") == 0
    assert contents(dest) == before


@pytest.mark.parametrize("stray", ["raw/notes.txt", "checkpoints/x"])
def test_directories_with_other_files_are_never_replaced(tmp_path, capsys, stray):
    options = write_files(tmp_path)
    dest = tmp_path / "dest"
    command = ["files", *options, *SMALL, "--dest", dest]
    assert run(*command) == 0
    (dest / stray).parent.mkdir(exist_ok=True)
    (dest / stray).write_text("mine")
    before = contents(dest)
    for force in ([], ["--force"]):
        expected = stray if stray != "checkpoints/x" else "checkpoints/"
        assert f"holds '{expected}', which does not belong to a prepared corpus" in error_of(
            capsys, *command, *force
        )
    assert contents(dest) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["iwslt"], "rhhn prepare iwslt: no such corpus, "),
        (["multi30k", "--from-dir", "."], "has no train.en"),
        (["synthetic", "--pairs", "0"], "--pairs 0: expected a number from 1 to"),
    ],
)
def test_bad_command_lines(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert re.search(message, error_of(capsys, *arguments))
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--source-lang", "fr"], "--target-lang fr: is the source language as well"),
        (["--target-lang", "f.r"], "--target-lang 'f.r': expected letters and digits"),
    ],
)
def test_bad_files_and_languages(tmp_path, capsys, change, message):
    options = write_files(tmp_path)
    before = names(tmp_path)
    assert message in error_of(capsys, "files", *options, *SMALL, *change, "--dest", tmp_path / "dest")
    assert names(tmp_path) == before


BAD_PAIRS = [
    ((b"a\xff", "b"), r"test\.en: line 3 is not UTF-8 \(byte 2 of the line, 0xff\)"),
    (("a", "b\0c"), r"test\.fr: line 3 holds a NUL byte"),
    (("x" * (1 << 20) + "y", "b"), r"test\.en: line 3 has more than 1,048,576 bytes"),
]


@pytest.mark.parametrize(("pair", "message"), BAD_PAIRS)
def test_invalid_text_in_a_test_set_names_file_and_line(tmp_path, capsys, pair, message):
    options = write_files(tmp_path, test=[*sentences(2), pair, *sentences(2)])
    found = error_of(capsys, "files", *options, *SMALL, "--dest", tmp_path / "dest")
    assert re.search(message, found)
    assert "validation and test text is taken as it is" in found
    assert names(tmp_path) == sorted(f"{split}.{language}" for split in SPLITS for language in ("en", "fr"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_split_is_refused(tmp_path, capsys, split):
    options = write_files(tmp_path, **{split: []})
    found = error_of(capsys, "files", *options, *SMALL, "--dest", tmp_path / "dest")
    assert "no training pair of 0" in found if split == "train" else f"{split}.fr: is empty" in found


LIMITED = (
    "import resource, runpy, sys;"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2);"
    "sys.argv = sys.argv[3:];"
    "runpy.run_module('rhhn_fairseq', run_name='__main__')"
)


@pytest.mark.parametrize(
    ("pairs", "limit", "finished"),
    [
        (25_000, 200_000, ["texts"]),
        (60_000, 300_000, ["texts", "pieces"]),
    ],
)
def test_a_full_disk_is_one_line_and_what_was_finished_stays(tmp_path, capsys, pairs, limit, finished):
    # The model has 240 kB; a pair 2 bytes a side as text, 6 encoded, and 12 in fairseq's index.
    options = write_files(tmp_path, train=[("abcdefghij"[number % 10], "k") for number in range(pairs)])
    more = ["--keep-duplicates", "--vocab-size", 17, "--workers", 1, "--dest", tmp_path / "dest"]
    command = [sys.executable, "-c", LIMITED, str(limit), *script("files", *options, *more)[1:]]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stderr.startswith("error: ") and "File too large" in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.returncode == 1
    assert not (tmp_path / "dest").exists()
    left = names(tmp_path / ".dest.work")
    assert left == sorted([*finished, *(f"{stage}.json" for stage in finished)])
    # With room on the disk, the same command goes on where it stopped.
    assert run("files", *options, *more) == 0
    assert re.findall("stage (\\w+): finished before", capsys.readouterr().out) == finished


def test_real_multi30k_is_practically_whole(tmp_path, data_dir, capsys):
    dest = tmp_path / "multi30k"
    command = ["multi30k", "--from-dir", data_dir / "multi30k", "--dest", dest, "--workers", 1]
    assert run(*command) == 0
    manifest = manifest_of(dest)
    counts = manifest["cleaning"][0]
    assert (counts["read"], counts["kept"], counts["duplicate"]) == (29_000, 28_995, 5)
    assert len(Dictionary.load(str(dest / "dict.en.txt"))) == 8000
    found = {name: entry["languages"]["fr"]["sentences"] for name, entry in manifest["splits"].items()}
    assert found == {"train": 28_995, "valid": 1014, "test": 1000, "test1": 1000}
    assert manifest["splits"]["test1"]["name"] == "test_2017_flickr"
    unknown = [
        entry["languages"][lang]["unknown"] for entry in manifest["splits"].values() for lang in ("en", "fr")
    ]
    assert unknown == [0] * 8
    processor = load_pieces(dest)
    with gzip.open(data_dir / "multi30k" / "test_2016_flickr.fr.gz", "rt", encoding="utf-8") as file:
        for text, kept in zip(file, lines_of(dest / "raw" / "test.fr"), strict=True):
            assert text == kept + "\n"
            assert processor.decode(processor.encode(kept)) == " ".join(kept.split())
    capsys.readouterr()
    assert run(*command) == 0
    assert "already prepared" in capsys.readouterr().out
