"""Networks as safetensors and JSON, those that the package has, and the scripts that read them."""

import json
import re

import numpy as np
import pytest
from helpers import golden_models, in_process, script_cli
from helpers.cli import python
from helpers.tiny_char_lm import build_model, build_task, write_corpus

from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.data.text.corpora import text_files
from rhhn_fairseq.data.text.prepare import prepare
from rhhn_fairseq.generate.strokes import WritingConfig
from rhhn_fairseq.generate.strokes import write as write_lines
from rhhn_fairseq.models.loading import load_handwriting
from rhhn_fairseq.nn import LSTM, StrokeNetwork
from rhhn_fairseq.saving import PACKAGED

sample, write = script_cli.load("sample"), script_cli.load("write")
convert = script_cli.load("convert")


def run(script, *arguments) -> int:
    return cli.run(lambda: script.main([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a character model."""
    folder = tmp_path_factory.mktemp("characters")
    build_model(build_task(write_corpus(folder)), layers=2, residual_from=2).save_pretrained(folder / "saved")
    return folder / "saved"


MISTAKES = {
    "unknown option": (lambda d: change(d, stack={"cell": "lstm", "x": 1}), "config.json: "),
    "a layer": (lambda d: LSTM(3, 4).save_pretrained(d), "holds LSTM, not CharacterNetwork"),
    "damaged": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 99), "model.safetensors: is damaged"),
}


def change(directory, **entries):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | entries))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_with_a_directory_is_one_line(saved, tmp_path, capsys, mistake):
    damage, message = MISTAKES[mistake]
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    assert run(sample, tmp_path) == 1
    refused = capsys.readouterr().err
    assert refused.startswith("error: ") and refused.count("\n") == 1 and message in refused


def test_a_converted_character_model_gives_the_checkpoints_text(tmp_path, capsys):
    checkpoint = golden_models.checkpoint("char_lm-ln_hyperlstm")
    data = golden_models.data_directory("char_lm", tmp_path)
    converted = tmp_path / "converted"
    assert run(convert, checkpoint, "--data", data, "--output", converted) == 0
    assert f"written: {converted}" in capsys.readouterr().out
    drawn = []
    for model in ([checkpoint, "--data", data], [converted]):
        assert run(sample, *model, "--prompt", "the ", "--length", 40) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] and drawn[0].startswith("the ") and len(drawn[0]) == 45


def test_a_converted_handwriting_model_writes_as_the_checkpoint(tmp_path, capsys):
    checkpoint = golden_models.checkpoint("handwriting-lstm_window")
    assert run(convert, checkpoint, "--output", tmp_path) == 0
    model, _ = load_handwriting(str(checkpoint))
    loaded = StrokeNetwork.from_pretrained(tmp_path)
    text = model.symbols[:3]
    one, other = (write_lines(m, WritingConfig(lines=1, points=9), [text])[0] for m in (model, loaded))
    assert np.array_equal(one.points, other.points)
    drawn = ["--text", text, "--lines", 1, "--points", 9, "--output", tmp_path / "line.svg"]
    assert run(write, tmp_path, *drawn) == 0
    assert (tmp_path / "line.svg").stat().st_size > 1000


def test_samples_of_a_batch_end_with_the_text_that_stops_them(saved, capsys):
    line = [saved, "--prompt", "the ", "--length", 200, "--temperature", 0.9]
    assert run(sample, *line, "--batch", 40, "--stop", "at") == 0
    texts = re.split(r"--- \d+\n", capsys.readouterr().out)[1:]
    sampled = [text.removesuffix("\n").removeprefix("the ") for text in texts]
    assert len(set(sampled)) > 30 and all(text.startswith("the ") for text in texts)
    ended = [text for text in sampled if len(text) < 200]
    assert ended and all(text.endswith("at") and text.count("at") == 1 for text in ended)
    assert all("at" not in text for text in sampled if text not in ended)
    assert run(sample, *line, "--stop", "at") == 0
    alone = capsys.readouterr().out.removesuffix("\n").removeprefix("the ")
    assert alone.find("at") in (-1, len(alone) - 2)


@pytest.mark.parametrize("script", [sample, write], ids=["sample", "write"])
def test_a_checkpoint_or_pretrained_not_both(script, capsys):
    for arguments in ([], ["x.pt", "--pretrained"]):
        assert run(script, *arguments) == 1
        assert "give either a checkpoint or --pretrained" in capsys.readouterr().err


def answer_without_fairseq(name: str, *arguments) -> str:
    """What a command prints where nothing has imported fairseq."""
    command, root = ["rhhn", name, *map(str, arguments)], str(script_cli.COMMANDS.parents[1])
    program = (
        f"import runpy, sys; sys.argv = {command}; sys.path.insert(0, {root!r})\n"
        "try: runpy.run_module('rhhn_fairseq', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'fairseq' not in sys.modules"
    )
    result = python(program)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_packaged_character_model_answers_without_fairseq():
    text = answer_without_fairseq("sample", "--pretrained", "--prompt", "import ", "--length", 40)
    assert text.startswith("import ") and len(text) == 48


def test_the_packaged_handwriting_model_answers_without_fairseq(tmp_path):
    asked = ["--text", "hi", "--lines", 1, "--output", tmp_path / "hi.svg"]
    written, changes = answer_without_fairseq("write", "--pretrained", *asked).splitlines()
    assert written == f"written: {tmp_path / 'hi.svg'}" and changes.startswith("the weights change by")
    assert (tmp_path / "hi.svg").stat().st_size > 1000
    asked = ["--lines", 2, "--points", 30, "--no-changes", "--output", tmp_path / "kanji.svg"]
    assert answer_without_fairseq("write", "--pretrained", "kanji", *asked).endswith("kanji.svg\n")


def test_the_packaged_models_are_small():
    sizes = [path.stat().st_size for path in PACKAGED.rglob("*") if path.is_file()]
    assert sizes and sum(sizes) < 6_000_000


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_checkpoint_samples_without_the_directory_of_its_training(as_bytes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("naïve café\n\t!" * 60)
    files = {split: [tmp_path / "text"] for split in ("train", "valid", "test")}
    prepare(text_files(files, as_bytes), tmp_path / "data")
    in_process.train(*in_process.char_lm(tmp_path, "run", "--max-update", 2)[1:], "data")
    asked = [tmp_path / "run" / "checkpoint_last.pt", "--prompt", "naïv", "--length", 30]
    assert run(sample, *asked, "--data", "data") == 0
    expected = capsys.readouterr().out
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(sample, *asked) == 0
    assert capsys.readouterr().out == expected
    assert run(sample, golden_models.checkpoint("char_lm-ln_hyperlstm")) == 1
    assert "dict.txt" in capsys.readouterr().err
