"""Networks as safetensors and JSON, those that the package has, and the scripts that read them."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import golden_models, script_cli, tiny_handwriting
from helpers.tiny_char_lm import build_model, build_task, write_corpus

from rhhn_fairseq import cli
from rhhn_fairseq.data.text.prompt import prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.handwriting_loading import load_handwriting
from rhhn_fairseq.networks import files
from rhhn_fairseq.writing.sampling import WritingConfig
from rhhn_fairseq.writing.sampling import write as write_lines

sample, write = script_cli.load("sample"), script_cli.load("write")
export_model = script_cli.load("export_model")


def run(script, *arguments) -> int:
    return cli.run(lambda: script.main([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """A character model, its task and its directory."""
    folder = tmp_path_factory.mktemp("characters")
    task = build_task(write_corpus(folder))
    model = build_model(task, layers=2, residual_from=2).eval()
    files.save(model, files.character_config(model, task.vocabulary), folder / "saved", "float32")
    return model, task, folder / "saved"


def test_character_networks_come_back_equal(characters):
    model, task, saved = characters
    loaded = files.load_characters(saved)
    assert loaded.vocabulary.corpus == task.vocabulary.corpus
    text = "the cat sat on\na log"
    assert prompt_indices(loaded.vocabulary, text) == task.encode_prompt(text)
    tokens = torch.tensor([task.encode_prompt(text)])
    y, _ = loaded.network.stack(loaded.network.embed(tokens.T))
    with torch.no_grad():
        assert torch.equal(loaded.network.output(y).transpose(0, 1), model(tokens)[0])


@pytest.mark.parametrize("window", [0, 3])
def test_stroke_networks_come_back_equal(tmp_path, window):
    model = tiny_handwriting.build("ln_hyperlstm", window=window, hyper_size=4)
    files.save(model, files.stroke_config(model), tmp_path, "float32")
    loaded = files.load_strokes(tmp_path)
    assert loaded.symbols == model.symbols and loaded.normalisation == model.normalisation
    config, texts = WritingConfig(lines=2, points=20), ["bad head"] if window else []
    for one, other in zip(write_lines(model, config, texts), write_lines(loaded, config, texts), strict=True):
        assert np.array_equal(one.points, other.points) and np.array_equal(one.changes, other.changes)


def test_float16_rounds_the_weights_and_nothing_else(characters, tmp_path):
    model, task, _ = characters
    files.save(model, files.character_config(model, task.vocabulary), tmp_path)
    loaded = files.load_characters(tmp_path).network.state_dict()
    for name, weight in model.state_dict().items():
        expected = weight.half().float() if weight.is_floating_point() else weight
        assert torch.equal(loaded[name], expected), name


def test_float16_refuses_what_it_cannot_hold(characters, tmp_path):
    model, task, _ = characters
    other = build_model(task)
    other.bias_out.data[0] = 1e6
    with pytest.raises(UsageError, match="bias_out has numbers that float16 cannot hold"):
        files.save(other, files.character_config(other, task.vocabulary), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


MISTAKES = {
    "no configuration": (lambda d: (d / "config.json").unlink(), "config.json: no such file"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "another format": (lambda d: change(d, format=9), "is not the configuration of a saved network"),
    "another kind": (lambda d: change(d, kind="strokes"), "is of a network of strokes, not of characters"),
    "no stack": (lambda d: change(d, stack=None), "config.json: does not fit its weights"),
    "unknown option": (lambda d: change(d, stack={"cell": "lstm", "x": 1}), "does not fit its weights"),
    "another size": (lambda d: change(d, embed_dim=3), "config.json"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
    "damaged": (lambda d: (d / "model.safetensors").write_bytes(b"x" * 99), "model.safetensors: is damaged"),
}


def change(directory, **entries):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | entries))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_with_a_directory_is_one_line(characters, tmp_path, capsys, mistake):
    damage, message = MISTAKES[mistake]
    for path in characters[2].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    assert run(sample, tmp_path) == 1
    refused = capsys.readouterr().err
    assert refused.startswith("error: ") and refused.count("\n") == 1 and message in refused


def test_an_exported_character_model_gives_the_checkpoints_text(tmp_path, capsys):
    checkpoint = golden_models.checkpoint("char_lm-ln_hyperlstm")
    data = golden_models.data_directory("char_lm", tmp_path)
    exported = tmp_path / "exported"
    assert run(export_model, checkpoint, "--data", data, "--output", exported, "--dtype", "float32") == 0
    assert f"written: {exported}" in capsys.readouterr().out
    drawn = []
    for model in ([checkpoint, "--data", data], [exported]):
        assert run(sample, *model, "--prompt", "the ", "--length", 40) == 0
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] and drawn[0].startswith("the ") and len(drawn[0]) == 45


def test_an_exported_handwriting_model_writes_as_the_checkpoint(tmp_path, capsys):
    checkpoint = golden_models.checkpoint("handwriting-lstm_window")
    assert run(export_model, checkpoint, "--output", tmp_path, "--dtype", "float32") == 0
    model, _ = load_handwriting(str(checkpoint))
    loaded = files.load_strokes(tmp_path)
    text = model.symbols[:3]
    one, other = (write_lines(m, WritingConfig(lines=1, points=9), [text])[0] for m in (model, loaded))
    assert np.array_equal(one.points, other.points)
    drawn = ["--text", text, "--lines", 1, "--points", 9, "--output", tmp_path / "line.svg"]
    assert run(write, tmp_path, *drawn) == 0
    assert (tmp_path / "line.svg").stat().st_size > 1000


@pytest.mark.parametrize("script", [sample, write], ids=["sample", "write"])
def test_a_checkpoint_or_pretrained_not_both(script, capsys):
    for arguments in ([], ["x.pt", "--pretrained"]):
        assert run(script, *arguments) == 1
        assert "give either a checkpoint or --pretrained" in capsys.readouterr().err


def answer_without_fairseq(name: str, *arguments) -> str:
    """What a script prints in a process of its own, because this one has imported fairseq."""
    script = script_cli.SCRIPTS / f"{name}.py"
    command = [f"{name}.py", *map(str, arguments)]
    program = (
        f"import runpy, sys; sys.argv = {command}; sys.path.insert(0, {str(script.parents[1])!r})\n"
        f"try: runpy.run_path({str(script)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'fairseq' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_packaged_character_model_answers_without_fairseq():
    text = answer_without_fairseq("sample", "--pretrained", "--prompt", "import ", "--length", 40)
    assert text.startswith("import ") and len(text) == 48


def test_the_packaged_handwriting_model_answers_without_fairseq(tmp_path):
    asked = ["--text", "hi", "--lines", 1, "--output", tmp_path / "hi.svg"]
    assert answer_without_fairseq("write", "--pretrained", *asked) == f"written: {tmp_path / 'hi.svg'}\n"
    assert (tmp_path / "hi.svg").stat().st_size > 1000


def test_the_packaged_models_are_small():
    sizes = [path.stat().st_size for path in files.PACKAGED.rglob("*") if path.is_file()]
    assert sizes and sum(sizes) < 6_000_000
