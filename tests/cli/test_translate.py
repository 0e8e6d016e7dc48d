"""rhhn translate and rhhn_fairseq.cli.translate, with a model of fairseq's own that has learnt its text."""

import ast
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from helpers import script_cli
from helpers.cli import USER_DIR, fairseq_train, run_module
from helpers.tiny_translation import arguments, french, prepare, sentences, train
from hypothesis import given
from hypothesis import strategies as st

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli.translate import EMPTY, SearchConfig, Translator, batches
from rhhn_fairseq.generate.scoring import read_translations
from rhhn_fairseq.models.loading import load_translation_models

script = script_cli.load("translate")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(data, tmp_path_factory):
    return train(data, tmp_path_factory.mktemp("run"))


@pytest.fixture
def translate(checkpoint, monkeypatch, capfdbinary):
    """Runs the program on bytes; what it writes as bytes, or what it says after a refusal."""

    def run(source: bytes, *options, status=0, checkpoint=checkpoint):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(source)))
        capfdbinary.readouterr()
        arguments = ["--checkpoint", str(checkpoint), *map(str, options)]
        assert cli.run(lambda: script.main(arguments)) == status
        captured = capfdbinary.readouterr()
        if status == 0:
            return captured.out
        error = captured.err.decode()
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    return run


def test_raw_text_in_raw_text_out(translate):
    source = b"one two three\n\nthe cat\n \t \nfour five six seven eight\ncat"
    expected = "un deux trois\n\nle chat\n\nquatre cinq six sept huit\nchat\n"
    assert translate(source).decode() == expected
    # A line at a time, and each batch a sentence, is the same.
    assert translate(source, "--buffer-size", 1, "--max-tokens", 1).decode() == expected
    assert translate(b"") == b"" and translate(b"\n") == b"\n"


def test_order_whatever_the_parts_and_batches(translate):
    lines = [*sentences("test"), "", "cat"] * 3
    source = "".join(f"{line}\n" for line in lines).encode()
    whole = translate(source).decode().split("\n")
    expected = [french(line) for line in lines] + [""]
    assert len(set(expected)) > 20
    assert sum(a == b for a, b in zip(whole, expected, strict=True)) > 0.9 * len(expected)
    for options in (("--buffer-size", 7), ("--max-tokens", 13), ("--buffer-size", 50, "--max-tokens", 30)):
        assert translate(source, *options).decode().split("\n") == whole


def test_n_best_with_scores_as_json_lines(translate):
    source = "one two\n\nten \u2028 \x85 cat\n".encode()
    output = translate(source, "--json", "--nbest", 3).decode()
    assert len(output.splitlines()) == 3
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["source"] for row in rows] == ["one two", "", "ten \u2028 \x85 cat"]
    first, empty, last = (row["translations"] for row in rows)
    assert empty == [{"text": "", "score": 0.0, "pieces": 0}]
    assert len(first) == len(last) == 3 and first[0]["text"] == "un deux" and first[0]["pieces"] == 2
    assert 0 > first[0]["score"] > first[1]["score"] > first[2]["score"]
    assert [row["translations"][0]["text"] for row in rows] == translate(source).decode().splitlines()


def test_the_same_as_fairseq_generate(translate, data, checkpoint, tmp_path):
    options = ["--path", checkpoint, "--cpu", "--post-process", "sentencepiece", "--beam", 3]
    result = run_module("fairseq_cli.generate", [data, "--user-dir", USER_DIR, *options])
    (tmp_path / "generate.txt").write_text(result.stdout, encoding="utf-8")
    generated = read_translations(str(tmp_path / "generate.txt"))
    source = (data / "raw" / "test.en").read_bytes()
    rows = [json.loads(line) for line in translate(source, "--json", "--beam", 3).splitlines()]
    assert [row["translations"][0]["text"] for row in rows] == generated.hypotheses
    assert generated.references == (data / "raw" / "test.fr").read_text().splitlines()
    scores = dict(re.findall(r"^H-(\d+)\t(\S+)", result.stdout, re.MULTILINE))
    for number, row in enumerate(rows):
        # fairseq prints logarithms to the base 2.
        expected = float(scores[str(number)]) * math.log(2)
        assert row["translations"][0]["score"] == pytest.approx(expected, abs=1e-4)


def test_only_a_newline_ends_a_line(translate):
    source = (
        "one\u2028two\x85three\rfour\r\n\x00\x01\x02\n漢字 \U0001f600\none \x00 two\n<pad> </s>\nten".encode()
    )
    lines = translate(source).split(b"\n")
    assert len(lines) == 7 and lines[-1] == b""
    assert lines[-2] == b"dix"
    # Two spellings of one sentence: a carriage return before the newline is none of its characters.
    assert translate(b"one two\r\n") == translate(b"one two\n") == b"un deux\n"
    assert translate(b"\xef\xbb\xbfone two\n") == b"un deux\n"


def test_a_line_of_ten_thousand_pieces_is_cut_with_one_warning(translate, caplog):
    source = b"one\n" + b"one two " * 5000 + b"\n" + b"two " * 300 + b"\ncat\n"
    with caplog.at_level(logging.WARNING):
        lines = translate(source, "--max-source-pieces", 20, "--beam", 1).decode().split("\n")
    assert len(lines) == 5 and (lines[0], lines[3]) == ("un", "chat")
    assert [record.getMessage() for record in caplog.records] == [
        "line 2 has 10000 pieces and is cut to the first 20 (see --max-source-pieces)",
        "2 lines were cut",
    ]
    # The number of the line counts those of the parts before.
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        translate(source, "--max-source-pieces", 300, "--beam", 1, "--buffer-size", 1)
    assert "line 2 has 10000 pieces" in caplog.text and "lines were cut" not in caplog.text


def test_bytes_that_are_no_text(translate, tmp_path):
    source = b"one\ntwo \xff\xfe\nthree\n"
    (tmp_path / "source").write_bytes(source)
    output = tmp_path / "out"
    error = translate(b"", "--input", tmp_path / "source", "--output", output, status=1)
    assert f"{tmp_path}/source: line 2 is not UTF-8 (byte 5 of the line, 0xff)" in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert "standard input: line 2 is not UTF-8" in translate(source, status=1)
    assert translate(source, "--errors", "replace").decode() == "un\ndeux\ntrois\n"
    endless = b"one\n" + b"\0" * (1 << 20) + b"1\n"
    assert "line 2 has more than 1,048,576 bytes" in translate(endless, status=1)


def test_a_file_is_replaced_when_all_is_translated(translate, tmp_path):
    source, output, link = tmp_path / "source", tmp_path / "out", tmp_path / "link"
    source.write_bytes(b"one\ntwo\n")
    output.write_bytes(b"before")
    link.symlink_to(output)
    assert "line 2" in translate(b"one\n\xff\n", "--output", output, status=1)
    assert output.read_bytes() == b"before"
    assert translate(b"", "--input", source, "--output", link) == b""
    assert output.read_bytes() == b"un\ndeux\n" and link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out", "source"]
    assert "is the file" in translate(b"", "--input", source, "--output", source, status=1)
    assert translate(b"one\n", "--output", "/dev/null") == b"" and not Path("/dev/null").is_file()


class Endless(io.RawIOBase):
    """A text without end."""

    def readinto(self, buffer):
        buffer[:20] = 5 * b"one\n"
        return 20

    def readable(self):
        return True


def test_memory_is_bounded_and_a_closed_pipe_ends_quietly(checkpoint, monkeypatch):
    """As in `... | head -n 3`: were more than a part of the text read at a time, this would not end."""
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    said = sys.stderr.write
    monkeypatch.setattr(sys.stderr, "write", lambda text: pytest.fail(text) if text else said(text))
    parts = []

    def close_after_three(*args, **kwargs):
        parts.append(original(*args, **kwargs))
        if len(parts) == 4:
            os.close(reader)
        return parts[-1]

    original = Translator.translate
    monkeypatch.setattr(Translator, "translate", close_after_three)
    arguments = ["--checkpoint", str(checkpoint), "--buffer-size", "5", "--beam", "1"]
    assert cli.run(lambda: script.main(arguments)) == 0
    assert [len(part) for part in parts] == [5, 5, 5, 5]


def test_line_by_line_through_pipes(checkpoint):
    """What a program that asks for one translation after the other needs: each comes before the next asks."""
    command = [sys.executable, "-m", "rhhn_fairseq", "translate", "--checkpoint", str(checkpoint)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        for question, answer in ((b"the cat\n", b"le chat\n"), (b"\n", b"\n"), (b"two\n", b"deux\n")):
            process.stdin.write(question)
            process.stdin.flush()
            assert process.stdout.readline() == answer
        process.stdin.write(b"one " * 2000 + b"\n\xff\n")
        process.stdin.close()
        assert len(process.stdout.read().splitlines()) == 1
        said = process.stderr.read().decode().splitlines()
    assert process.returncode == 1
    assert said == [
        "WARNING: line 4 has 2000 pieces and is cut to the first 1023 (see --max-source-pieces)",
        "error: standard input: line 5 is not UTF-8 (byte 1 of the line, 0xff)",
    ]


def test_python_of_the_guide_translates(checkpoint, tmp_path, monkeypatch, capsys):
    page = (Path(USER_DIR).parent / "docs" / "translation.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (named,) = re.findall(r"checkpoints/\S+\.pt", block)
    (tmp_path / named).parent.mkdir(parents=True)
    (tmp_path / named).symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "translation.md", "exec"), {})
    (best, score), (_, lower) = ast.literal_eval(capsys.readouterr().out)
    assert best and score > lower


def test_an_ensemble_averages_probabilities(translate, checkpoint, tmp_path):
    state = torch.load(checkpoint, weights_only=True)
    # The same order of words, less sure.
    for part in ("weight", "bias"):
        state["model"][f"decoder.fc_out.{part}"] *= 0.5
    other = tmp_path / "other.pt"
    torch.save(state, other)

    def texts_and_scores(*options, **settings):
        rows = translate(b"one two\nseven\n", "--json", *options, **settings).splitlines()
        best = [json.loads(row)["translations"][0] for row in rows]
        return [row["text"] for row in best], torch.tensor([row["score"] for row in best])

    texts, scores = texts_and_scores()
    twice, same_scores = texts_and_scores("--checkpoint", checkpoint)
    assert twice == texts
    torch.testing.assert_close(same_scores, scores, rtol=0, atol=1e-5)
    mixed, mixed_scores = texts_and_scores("--checkpoint", other)
    unsure_scores = texts_and_scores(checkpoint=other)[1]
    assert mixed == texts and bool((unsure_scores < mixed_scores).all() and (mixed_scores < scores).all())
    assert torch.equal(texts_and_scores(checkpoint=f"{checkpoint}:{other}")[1], mixed_scores)
    assert "nowhere.pt" in translate(b"", checkpoint=f"{checkpoint}:{tmp_path}/nowhere.pt", status=1)


@pytest.fixture(scope="module")
def gnmt_checkpoint(checkpoint, tmp_path_factory):
    """The same model, as if it had been trained with --task gnmt_translation."""
    state = torch.load(checkpoint, weights_only=True)
    search = {"length_penalty": "fairseq", "coverage_penalty": 0.0, "beam_size_threshold": 0.0}
    state["cfg"]["task"] |= {"_name": "gnmt_translation", **search}
    path = tmp_path_factory.mktemp("gnmt") / "checkpoint.pt"
    torch.save(state, path)
    return path


def test_options_of_the_gnmt_search_reach_the_task(translate, gnmt_checkpoint):
    options = {"length_penalty": "gnmt:0.5", "coverage_penalty": 0.25, "beam_size_threshold": 3.0}
    loaded = load_translation_models([str(gnmt_checkpoint)], task_options=options)
    assert {name: loaded.task.cfg[name] for name in options} == options
    assert translate(b"the cat\n", checkpoint=gnmt_checkpoint) == b"le chat\n"
    error = translate(b"one\n", "--length-penalty", "long", checkpoint=gnmt_checkpoint, status=1)
    assert "--length-penalty long" in error


@pytest.mark.slow
def test_a_gnmt_model_and_its_search(translate, data, tmp_path):
    """Scores of Wu et al., equation 14, and the pieces' fingerprint from training to translating."""
    pieces = (data / "pieces.model").read_bytes()
    prepared = tmp_path / "data"
    shutil.copytree(data, prepared)
    manifest = {"pieces_sha256": hashlib.sha256(pieces).hexdigest()}
    (prepared / "manifest.json").write_text(json.dumps(manifest))
    options = ["--arch", "lstm_gnmt_small", "--hidden-size", 64, "--embed-dim", 64, "--dropout", 0]
    options += ["--encoder-layers", 1, "--decoder-layers", 1, "--attention", "paper"]
    options += ["--max-epoch", 40, "--no-epoch-checkpoints"]
    fairseq_train(arguments(prepared, tmp_path, "--task", "gnmt_translation", *options))
    checkpoint = tmp_path / "checkpoint_last.pt"

    def best_translation(*options):
        output = translate(b"one two three\n", "--json", *options, checkpoint=checkpoint)
        return json.loads(output)["translations"][0]

    plain, total = best_translation(), best_translation("--length-penalty", "none")
    assert plain["text"] == "un deux trois"
    # Three pieces and the end of the sentence.
    assert plain["score"] == pytest.approx(total["score"] / 4, rel=1e-3)
    # An unknown field of the protocol buffer changes nothing that sentencepiece does, but the file.
    (prepared / "pieces.model").write_bytes(pieces + b"\xc0\x0c\x01")
    error = translate(b"one\n", checkpoint=checkpoint, status=1)
    assert manifest["pieces_sha256"][:12] in error and f"in {prepared / 'pieces.model'}" in error


@pytest.fixture(scope="module")
def other_pieces(tmp_path_factory):
    """A sentencepiece model of another language."""
    path = tmp_path_factory.mktemp("pieces") / "other.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["зачем ты так поздно пришла домой"] * 5),
            model_writer=file,
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    return path


REFUSED = {
    "no --json": (["--nbest", 2], "--nbest 2 needs --json"),
    "search": (["--length-penalty", "gnmt:0.2"], "--length-penalty gnmt:0.2: the task of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_line(case, translate):
    options, reason = REFUSED[case]
    assert reason in translate(b"one\n", *options, status=1)


def test_pieces_and_dictionaries_have_to_fit(translate, data, other_pieces):
    error = translate(b"one\n", "--sentencepiece-model", other_pieces, status=1)
    assert f"{other_pieces} is not the sentencepiece model of the dictionary in {data}" in error


def test_the_pieces_are_those_of_the_target_too(translate, data, tmp_path):
    for language in ("en", "fr"):
        shutil.copy(data / f"dict.{language}.txt", tmp_path)
    shutil.copy(data / "pieces.model", tmp_path)
    (tmp_path / "test.en-fr.en.bin").touch()
    entries = (tmp_path / "dict.fr.txt").read_text().splitlines()
    (tmp_path / "dict.fr.txt").write_text("".join(f"other{n} 1\n" for n, _ in enumerate(entries)))
    error = translate(b"one\n", "--data", tmp_path, status=1)
    assert f"{tmp_path / 'pieces.model'} is not the sentencepiece model of the dictionary" in error


def test_models_of_other_directions_are_refused(translate, checkpoint, tmp_path):
    there, back = tmp_path / "there.pt", tmp_path / "back.pt"
    state = torch.load(checkpoint, weights_only=True)
    for path, languages in ((there, ("en", "fr")), (back, ("fr", "en"))):
        state["cfg"]["task"] |= dict(zip(("source_lang", "target_lang"), languages, strict=True))
        torch.save(state, path)
    error = translate(b"one\n", "--checkpoint", back, checkpoint=there, status=1)
    assert f"{there} is for translation from en to fr, {back} for translation from fr to en" in error
    # The checkpoint's own languages come from the data.
    translate(b"one\n", "--checkpoint", there)


def test_a_model_that_diverged_is_refused(translate, checkpoint, tmp_path):
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["decoder.fc_out.bias"][7] = math.nan
    torch.save(state, tmp_path / "nan.pt")
    error = translate(b"one\n", checkpoint=tmp_path / "nan.pt", status=1)
    assert "nan.pt: decoder.fc_out.bias holds NaN or infinite numbers: the run diverged" in error


def test_as_a_library(checkpoint):
    translator = Translator(load_translation_models([str(checkpoint)]), SearchConfig(beam=2, nbest=2))
    done = []
    found = translator.translate(["one two", "", "cat"], on_batch=done.append)
    assert [best.text for best, *_ in found] == ["un deux", "", "chat"]
    assert [len(hypotheses) for hypotheses in found] == [2, 1, 2] and found[1] == [EMPTY]
    assert sum(done) == 3
    assert translator.translate([]) == [] and translator.translate([" "]) == [[EMPTY]]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_batches_hold_everything_once_within_the_limit(lengths, limit):
    found = batches(lengths, limit)
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    for batch in found:
        size = len(batch) * max(lengths[index] for index in batch)
        assert size <= limit or len(batch) == 1
    # No batch would have taken the first sentence of the next one.
    for batch, following in zip(found, found[1:], strict=False):
        assert (len(batch) + 1) * lengths[batch[0]] > limit or lengths[following[0]] > lengths[batch[0]]
