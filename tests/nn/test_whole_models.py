"""Whole models as ONNX graphs: run.py computes what torch computes, without torch."""

import json
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import tiny_handwriting, tiny_translation
from helpers.cli import fairseq_train
from helpers.tiny_char_lm import build_model, build_task, write_corpus

from rhhn_fairseq.cli import convert
from rhhn_fairseq.data.text.words import WordVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.models.loading import load_translation_models
from rhhn_fairseq.nn import exporting, from_pretrained, packaged
from rhhn_fairseq.nn.character import CharacterNetwork
from rhhn_fairseq.nn.whole_models import export_model

# Float32 of torch against that of onnxruntime, over a few steps; logits are of the order of 1.
TOLERANCE = 1e-5
CELLS = ["ln_hyperlstm", *(pytest.param(cell, marks=pytest.mark.slow) for cell in ("lstm", "hyperrhn"))]

# Hydra deprecates what fairseq's own configuration rests on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def runner(model, directory) -> dict:
    """The functions of the exported model's run.py."""
    export_model(model, directory)
    return runpy.run_path(str(directory / "run.py"))


def run_alone(directory, *arguments, stdin="") -> str:
    """What run.py prints where neither torch nor this package is imported."""
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__');"
    code += "assert not {'torch', 'fairseq', 'rhhn_fairseq'} & sys.modules.keys()"
    line = [sys.executable, "-c", code, directory / "run.py", *map(str, arguments)]
    return subprocess.run(line, input=stdin, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("cell", CELLS)
@torch.no_grad()
def test_logits_of_a_character_model(tmp_path, cell):
    options = {"lstm": {"hyper_size": None, "hyper_embed_size": None}, "hyperrhn": {"hyper_embed_size": None}}
    task = build_task(write_corpus(tmp_path))
    model = build_model(task, cell=cell, layers=2, **options.get(cell, {})).eval()
    read, state, entries = runner(model, tmp_path)["read"], None, [2, 5, 7, 7, 4]
    expected = model(torch.tensor([entries]))[0][0].numpy()
    for entry, row in zip(entries, expected, strict=True):
        logits, state = read(entry, state)
        np.testing.assert_allclose(logits, row, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("start", [pytest.param("zeros", marks=pytest.mark.slow), "first"])
@torch.no_grad()
def test_mixtures_of_a_handwriting_model(tmp_path, start):
    model = tiny_handwriting.disturb(tiny_handwriting.build("ln_hyperlstm", 3, layers=2, window_start=start))
    functions = runner(model, tmp_path)
    points, text = torch.randn(1, 5, 3), torch.tensor([[1, 2, 2, 0]])
    raw, extra = model(points, text=text)
    about = json.loads((tmp_path / "model.json").read_text())
    state = [np.zeros((1, size), np.float32) for size in about["state"]]
    if about["window"] is not None:
        state[about["window"]][0, 1] = 1
    assert (about["window"] is None) == (start == "zeros")
    for point, row, places in zip(points[0], raw[0], extra["phi"][0], strict=True):
        mixture, phi, state = functions["read"](point.numpy(), text.numpy(), state)
        np.testing.assert_allclose(mixture, row.numpy(), atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(phi, places.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@torch.no_grad()
def test_a_handwriting_model_without_a_text(tmp_path):
    model = tiny_handwriting.disturb(tiny_handwriting.build("ln_hyperlstm", layers=2))
    read, points = runner(model, tmp_path)["read"], torch.randn(1, 5, 3)
    state = [np.zeros((1, size), np.float32) for size in model.stack.state_sizes]
    for point, row in zip(points[0], model(points)[0][0], strict=True):
        mixture, _, state = read(point.numpy(), np.zeros((1, 1), int), state)
        np.testing.assert_allclose(mixture, row.numpy(), atol=TOLERANCE, rtol=TOLERANCE)
    drawing = run_alone(tmp_path, "")
    # The point that the pen touches first, and 400 drawn ones.
    assert len(re.findall("[ML]", drawing)) == 401 and re.search('d="M0.0 0.0L', drawing)
    # Whatever the corpus's units.
    heights = [float(y) for y in re.findall(r"[ML]\S+ ([-\d.]+)", drawing)]
    assert max(heights) - min(heights) == pytest.approx(100, abs=0.11)


@torch.no_grad()
def compare_translation(model, functions, pieces, atol):
    """Compares log-probabilities of the encoder and of three steps of two hypotheses."""
    memory, state, _ = functions["encode"](" ".join(pieces))
    source = torch.tensor([[*(model.encoder.dictionary.index(piece) for piece in pieces), 2]])
    rows = torch.tensor([[2, 5, 9], [2, 6, 4]])
    expected = model(source.expand(2, -1), None, rows)[0].log_softmax(-1).numpy()
    state = [np.repeat(tensor, 2, axis=0) for tensor in state]
    for at in range(3):
        scores, state = functions["step"](rows[:, at].tolist(), memory, state)
        np.testing.assert_allclose(scores, expected[:, at], atol=atol, rtol=0)


@pytest.mark.parametrize(
    "options", [{"attention_normalised": True}, pytest.param({"attention": "v2"}, marks=pytest.mark.slow)]
)
def test_translation_models_with_additive_attention(tmp_path, options):
    sizes = {"encoder_layers": 2, "decoder_layers": 2}
    model, dictionary = tiny_translation.random_model(arch="lstm_gnmt", **sizes, **options)
    for parameter in model.parameters():
        parameter.data.mul_(0.25)  # Large weights would amplify the rounding of sums.
    functions, pieces = runner(model.float(), tmp_path), [dictionary[place] for place in (5, 8, 6)]
    compare_translation(model, functions, pieces, TOLERANCE)
    # An empty line stays empty, whatever the model would make of it.
    assert run_alone(tmp_path, stdin="\n") == "\n"


@pytest.mark.slow
def test_a_translation_model_from_the_command_line(tmp_path, capsys):
    """The graphs compute what torch does; and a text is translated."""
    corpus = tiny_translation.prepare(tmp_path)
    sizes = ["--arch", "hyperlstm_gnmt_small", "--hidden-size", 64, "--embed-dim", 32, "--hyper-size", 8]
    line = tiny_translation.arguments(
        corpus, tmp_path / "models", *sizes, "--max-epoch", 12, "--no-epoch-checkpoints"
    )
    fairseq_train([*line, "--dropout", 0, "--warmup-updates", 10, "--no-eval-bleu"])
    path = tmp_path / "models" / "checkpoint_last.pt"
    convert.main([str(path), "--onnx", str(tmp_path / "graphs")])
    loaded = load_translation_models([str(path)], str(corpus))
    (model,), functions = loaded.models, runpy.run_path(str(tmp_path / "graphs" / "run.py"))
    english = tiny_translation.sentences("test")[:8]
    pieces = loaded.pieces.encode(english[0], out_type=str)
    compare_translation(model.eval(), functions, pieces, 1e-4)
    lines = "".join(" ".join(loaded.pieces.encode(text, out_type=str)) + "\n" for text in english)
    translated = run_alone(tmp_path / "graphs", stdin=lines).splitlines()
    assert sum(map(str.__eq__, translated, map(tiny_translation.french, english))) >= 6


@pytest.mark.parametrize(
    "kind, text, start",
    [
        ("characters", "def ", "def "),
        pytest.param("handwriting", "hi", "<svg ", marks=pytest.mark.slow),
    ],
)
def test_the_packaged_models_write_without_torch(kind, text, start, tmp_path):
    export_model(from_pretrained(packaged(kind)), tmp_path / kind)
    written = run_alone(tmp_path / kind, text)
    assert written.startswith(start) and len(written) > 200


def test_options_without_an_effect_on_graphs_are_refused(tmp_path):
    for option in (["--dtype", "float16"], ["--data", "d"]):
        with pytest.raises(UsageError, match=f"^{option[0]} has no effect on these graphs"):
            convert.main([str(packaged("characters")), "--onnx", str(tmp_path), *option])


def test_models_without_graphs_are_refused(tmp_path):
    words = CharacterNetwork(
        StackConfig(cell="lstm", input_size=3, hidden_size=2), WordVocabulary(["a", "b"])
    )
    with pytest.raises(UsageError, match="--onnx: this is a model of words"):
        export_model(words, tmp_path)
    with pytest.raises(UsageError, match="--onnx: Linear is no model of characters, of handwriting, or GNMT"):
        export_model(torch.nn.Linear(2, 2), tmp_path)
    task = build_task(write_corpus(tmp_path))
    sizes = {"rhn_depth": 2, "first_step": "skip", "hyper_size": None, "hyper_embed_size": None}
    with pytest.raises(UsageError, match="trained with --first-step skip"):
        export_model(build_model(task, cell="rhn", **sizes), tmp_path)


def test_a_program_of_the_users_is_not_replaced(tmp_path):
    (tmp_path / "run.py").write_text("mine")
    with pytest.raises(UsageError, match="has a run.py of its own, name another directory"):
        export_model(from_pretrained(packaged("characters")), tmp_path)
    assert (tmp_path / "run.py").read_text() == "mine"


@pytest.mark.slow
def test_an_export_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    model, _ = tiny_translation.random_model(encoder_layers=1, decoder_layers=3)
    size = sum(weight.numel() * weight.element_size() for weight in model.encoder.parameters())
    monkeypatch.setattr(exporting, "LARGEST", size + 1)
    with pytest.raises(UsageError, match="step.onnx: the weights have [0-9,]+ bytes"):
        export_model(model, tmp_path / "graphs")
    assert not (tmp_path / "graphs").exists()
