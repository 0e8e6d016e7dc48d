"""What 8-bit weights cost a character model: the bits, and the lanes that are read."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import golden_models

from rhhn_fairseq.bench import quantised
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.loading import load_char_lm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    data = golden_models.data_directory("char_lm", tmp_path_factory.mktemp("quantised"))
    return load_char_lm(str(golden_models.checkpoint("char_lm-ln_hyperlstm")), data)[0]


@pytest.fixture
def text(model, tmp_path):
    symbols = [chr(code) for code in model.symbol_codes.tolist()]
    path = tmp_path / "text.txt"
    path.write_text("".join(symbols[(n * n) % len(symbols)] for n in range(301)), encoding="utf-8")
    return path


def test_bits_are_the_mean_over_all_symbols_but_the_first_of_a_lane(model, text):
    tokens = quantised.lanes(model, str(text), 2, 300)
    assert tokens.shape == (2, 150)
    nats = 0.0
    with torch.no_grad():
        for lane in tokens:
            y, _ = model.stack(model.embed(lane[:-1].unsqueeze(1)))
            log_p = model.output(y[:, 0]).double().log_softmax(-1)
            nats -= log_p[range(149), lane[1:]].sum().item()
    # Chunks with a carried state, in float32, against one pass.
    assert quantised.bits_per_character(model, tokens) == pytest.approx(nats / 298 / math.log(2), rel=1e-6)


def test_lanes_that_cannot_be_read(model, text, tmp_path):
    for count in (0, 151):
        with pytest.raises(UsageError, match=f"--lanes {count}: choose from 1 to 150"):
            quantised.lanes(model, str(text), count, 300)
    text.write_text("\u2603 snow")
    with pytest.raises(UsageError, match="--symbols -1 is too small, the smallest is 2"):
        quantised.lanes(model, str(text), 1, -1)
    with pytest.raises(UsageError, match="has symbols the model does not know"):
        quantised.lanes(model, str(text), 1, 300)
    with pytest.raises(UsageError, match="nowhere.txt: cannot be read"):
        quantised.lanes(model, str(tmp_path / "nowhere.txt"), 1, 300)


@pytest.mark.parametrize("mode, reverse", [("bytes", False), ("text", True)])
def test_lanes_are_what_the_model_reads(text, mode, reverse):
    text.write_text("\u00e9t\u00e9 ", encoding="utf-8")
    symbols = map(chr, "\u00e9t ".encode()) if mode == "bytes" else "\u00e9t "
    vocabulary = CharVocabulary(list(symbols), mode=mode, reverse=reverse)
    (lane,) = quantised.lanes(SimpleNamespace(vocabulary=vocabulary), str(text), 1, 300).tolist()
    read = vocabulary.decode(lane)
    assert read == "\u00e9t\u00e9 ".encode() if mode == "bytes" else read == " \u00e9t\u00e9"


def test_the_command(model, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quantised, "STEPS", 2)
    monkeypatch.setattr(quantised, "load_char_lm", lambda path: (model, None))
    quantised.main(["model.pt", str(text), "--lanes", "2"])
    machine, read, *models = capsys.readouterr().out.splitlines()
    assert read.startswith("300 symbols in 2 lanes") and [line.split()[0] for line in models] == [
        "float32",
        "int8",
    ]
    assert all("bits per character" in line for line in models)
