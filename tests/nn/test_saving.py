"""Cells, layers and networks saved to a directory and loaded again."""

import json
import os
import sys

import pytest
import torch
from helpers import tiny_reader

import rhhn_fairseq.nn as layers
from rhhn_fairseq.cells import CELLS, build_cell, cell_options
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.data.text.vocabulary import CharVocabulary, escape_byte
from rhhn_fairseq.data.text.words import WordVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.layers.window import WindowConfig
from rhhn_fairseq.nn import (
    LSTM,
    CharacterNetwork,
    LNHyperLSTM,
    StrokeNetwork,
    from_pretrained,
    layer_of,
    quantize_dynamic,
    save_pretrained,
)

C, H, T, B = 4, 6, 5, 3


def _small(cell):
    return {"hyper_size": 3} if "hyper_size" in cell_options(cell) else {}


@pytest.mark.parametrize("name", CELLS)
def test_cells_and_layers_come_back(name, tmp_path):
    cell = build_cell(name, C, H, zoneout=0.25, **_small(name)).eval()
    layer = layer_of(name)(C, H, 2, batch_first=True, bidirectional=True, **_small(name)).to(torch.bfloat16)
    for module, x in ((cell, torch.randn(T, B, C)), (layer.eval(), torch.randn(B, T, C).bfloat16())):
        save_pretrained(module, tmp_path / "saved")
        again = from_pretrained(tmp_path / "saved")
        assert type(again) is type(module) and repr(again) == repr(module)
        assert torch.equal(again(x)[0], module(x)[0])
        assert all(parameter.requires_grad for parameter in again.parameters())


@pytest.mark.parametrize("name", [*CELLS, "direct"])
def test_whole_layers_and_cells_are_loaded_as_safe(name, tmp_path):
    direct = {"hyper_map": "direct"} if name == "direct" else {}
    kind = layer_of("hyper" if direct else name)
    step = getattr(layers, f"{kind.__name__}Cell")
    rnn = kind(C, H, 2, bidirectional=True, initial_state="learned", lstm_state=False, **direct)
    x, quantised = torch.randn(T, B, C), quantize_dynamic(kind(C, H, **direct), smallest=1)
    for module, read in ((rnn, x), (quantised, x), (step(C, H, **direct), x[0])):
        torch.save(module, tmp_path / "whole.pt")
        with torch.serialization.safe_globals(layers.safe_globals()):
            again = torch.load(tmp_path / "whole.pt")
        (y, *_), (expected, *_) = again(read), module(read)
        assert type(again) is type(module) and torch.equal(y, expected)


def test_tied_weights_are_stored_twice(tmp_path):
    rnn, x = LSTM(H, H, 2), torch.randn(T, B, H)
    rnn.stack.cells[1].weight_h = rnn.stack.cells[0].weight_h
    rnn.save_pretrained(tmp_path)
    assert torch.equal(from_pretrained(tmp_path)(x)[0], rnn(x)[0])


def bits(module) -> dict:
    """The state dict with its floating-point numbers as whole ones, in which NaN equals itself."""
    widths = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return {
        name: tensor.view(widths[tensor.element_size()]).tolist()
        for name, tensor in module.state_dict().items()
    }


def strokes(window: int) -> StrokeNetwork:
    sizes = dict(cell="ln_hyperlstm", input_size=3, hidden_size=H, layers=2, cell_options={"hyper_size": 3})
    stack = WindowConfig(**sizes, symbols=4, window=window) if window else StackConfig(**sizes)
    symbols = " abé" if window else ""
    return StrokeNetwork(stack, Normalisation((2.5, -0.5), (10.0, 12.0)), symbols, 2).eval()


@pytest.mark.parametrize("window", [0, 2])
def test_networks_of_strokes_come_back_bit_by_bit(window, tmp_path):
    network = strokes(window)
    network.bias_out.data[:2] = torch.tensor([-0.0, 1e-42])
    network.save_pretrained(tmp_path)
    again = StrokeNetwork.from_pretrained(tmp_path)
    assert bits(again) == bits(network) and not again.training
    assert again.symbols == network.symbols and again.normalisation == network.normalisation
    inputs = (torch.randn(B, T, 3), None, torch.randint(4, (B, 6)))
    assert torch.equal(again(*inputs)[0], network(*inputs)[0])


@pytest.mark.parametrize("mode", ["text", "bytes"])
@pytest.mark.parametrize("newline", [True, False])
def test_networks_of_characters_come_back_bit_by_bit(mode, newline, tmp_path):
    symbols = list("cab ") if mode == "text" else [escape_byte(value) for value in (0xC3, 0xA9, 0x61)]
    vocabulary = CharVocabulary([symbol.replace(" ", r"\x20") for symbol in symbols], mode, newline, "tiny")
    stack = StackConfig(cell="gru", input_size=3, hidden_size=H, layers=2)
    network = CharacterNetwork(stack, vocabulary, embed_dim=3, embedding_dropout=0.1).eval()
    network.save_pretrained(tmp_path)
    again = CharacterNetwork.from_pretrained(tmp_path)
    assert bits(again) == bits(network) and not again.training
    for name in ("symbols", "mode", "newline_occurs", "corpus"):
        assert getattr(again.vocabulary, name) == getattr(vocabulary, name)
    assert again.embedding_dropout == 0.1 and again.stack.config == stack
    tokens = torch.arange(len(vocabulary)).unsqueeze(1)
    logits = [each.output(each.stack(each.embed(tokens))[0]) for each in (again, network)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("name", CELLS)
def test_float32_comes_back_bit_by_bit(name, tmp_path):
    for module in (build_cell(name, C, H, **_small(name)), layer_of(name)(C, H, **_small(name))):
        weight = next(module.parameters())
        # The smallest denormal number, -0 and the largest number.
        weight.data.flatten()[:3] = torch.tensor([1, -(1 << 31), 0x7F7FFFFF], dtype=torch.int32).view(
            torch.float32
        )
        module.save_pretrained(tmp_path)
        assert bits(type(module).from_pretrained(tmp_path)) == bits(module)


@pytest.mark.parametrize("name", CELLS)
def test_a_layer_without_biases_has_one_type_again(name, tmp_path):
    """The zeros in place of its biases are in no file."""
    layer = layer_of(name)(C, H, bias=False, dtype=torch.float64, **_small(name)).eval()
    layer.save_pretrained(tmp_path)
    x = torch.randn(3, 2, C, dtype=torch.float64)
    assert torch.equal(type(layer).from_pretrained(tmp_path)(x)[0], layer(x)[0])


def test_narrow_files_give_the_type_of_the_module(tmp_path):
    network, _ = tiny_reader.build("ln_hyperlstm", hyper_size=3)
    network.float().save_pretrained(tmp_path, torch.float16)
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * sum(w.numel() for w in network.parameters())
    for name, tensor in CharacterNetwork.from_pretrained(tmp_path).state_dict().items():
        own = network.state_dict()[name]
        expected = own.half().float() if own.is_floating_point() else own
        assert tensor.dtype == own.dtype and torch.equal(tensor, expected), name
    network.bias_out.data[0] = 1e6
    with pytest.raises(UsageError, match="bias_out has numbers that float16 cannot hold"):
        network.save_pretrained(tmp_path / "other", torch.float16)
    assert not (tmp_path / "other").exists()


def test_another_class_is_refused(tmp_path):
    LSTM(C, H).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="holds LSTM, not LNHyperLSTM"):
        LNHyperLSTM.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="holds LSTM, not CharacterNetwork"):
        CharacterNetwork.from_pretrained(tmp_path)


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(
        UsageError, match=r"the LSTM has other weights than .* \(.*weight_h.*\); save it before"
    ):
        save_pretrained(quantize_dynamic(LSTM(C, H), smallest=1), tmp_path)

    class Doubled(LSTM):
        """A layer of somebody's own."""

    with pytest.raises(UsageError, match="a Doubled would be loaded as LSTM"):
        Doubled(C, H).save_pretrained(tmp_path)
    pruned = LSTM(C, H)
    pruned.stack.cells[0].extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UsageError, match=r"other weights than its options describe \(stack.cells.0.extra\)"):
        pruned.save_pretrained(tmp_path)

    class Coupled(type(build_cell("lstm", C, H))):
        """A cell of somebody's own, with the options of its parent."""

    with pytest.raises(UsageError, match="the cell Coupled is not in the registry"):
        save_pretrained(Coupled(build_cell("lstm", C, H).config), tmp_path)
    mixed = LSTM(C, H, 2)
    mixed.stack.cells[0].double()
    with pytest.raises(UsageError, match="the weights are float32, float64, expected one of"):
        save_pretrained(mixed, tmp_path)
    words = CharacterNetwork(StackConfig(cell="gru", input_size=3, hidden_size=H), WordVocabulary(["a", "b"]))
    with pytest.raises(UsageError, match="this is a model of words; only those of characters"):
        save_pretrained(words, tmp_path)
    for dtype, shown in (
        (torch.int8, "torch.int8"),
        (torch.float8_e5m2, "torch.float8_e5m2"),
        ("float16", "'float16'"),
    ):
        expected = (
            f"save_pretrained: dtype={shown} is not possible, choose from torch.float16, torch.bfloat16, "
        )
        with pytest.raises(UsageError, match=expected):
            save_pretrained(LSTM(C, H), tmp_path / "none", dtype)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"kind": "tree"}, "config.json: kind='tree' is unknown, choose from cell, characters, layer"),
        ({"kind": []}, r"config.json: kind=\[\] is unknown"),
        ({"format": 1}, "config.json: format=1 is unknown, this version reads 2"),
        ({"dtype": "int4"}, "config.json: dtype='int4' is unknown, choose from bfloat16, float16, float32"),
        ({"hidden_size": 7}, r"stack.cells.0.c_norm_bias is \(6,\), and \(7,\) in the module"),
        # Nothing of this size is made before it is compared.
        ({"hidden_size": 1 << 18, "input_size": 1 << 18}, "config.json: .*asks for far more than"),
        ({"num_layers": 900}, "config.json: .*asks for far more than the 19 weights that are stored"),
        ({"hidden_size": 10**30}, "config.json: .*hidden_size=10* is too large"),
        ({"hidden_size": "6"}, "config.json: .*hidden_size='6' is not a whole number"),
        ({"options": {"colour": 1}}, "config.json: .*cell ln_hyperlstm has no option 'colour'"),
        ({"cell": "tree"}, "config.json: unknown cell 'tree'"),
        ({"code": "import os"}, "config.json: .*cell ln_hyperlstm has no option 'code'"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(change, reason, tmp_path):
    LNHyperLSTM(C, H, hyper_size=3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UsageError, match=reason):
        from_pretrained(tmp_path)


def test_networks_that_do_not_fit_are_refused(tmp_path):
    network, _ = tiny_reader.build("rhn")
    network.save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    deep = whole["stack"] | {"cell_options": {"rhn_depth": 900}}
    for change, reason in (
        ({"stack": None}, "config.json: "),
        ({"stack": whole["stack"] | {"x": 1}}, "config.json: .*unexpected keyword argument 'x'"),
        ({"stack": deep}, "config.json: asks for far more than"),
        ({"embed_dim": 3}, r"model.safetensors: embedding is missing, and \(7, 3\) in the module"),
        ({"newline_occurs": False}, "config.json: symbol_codes has the end of a line where"),
        ({"mode": "bits"}, "config.json: mode 'bits' is unknown"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(whole | change))
        with pytest.raises(UsageError, match=reason):
            from_pretrained(tmp_path)
    strokes(2).save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(whole | {"mixtures": 3}))
    with pytest.raises(UsageError, match=r"model.safetensors: bias_out is \(13,\), and \(19,\)"):
        from_pretrained(tmp_path)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    with pytest.raises(UsageError, match="modules need safetensors: pip install safetensors"):
        LSTM(C, H).save_pretrained(tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="test_saving.py: no such directory"):
        from_pretrained(__file__)
    with pytest.raises(UsageError, match="someone/model: no such directory; names on .*hub need"):
        from_pretrained("someone/model")


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such directory"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="config.json"):
        from_pretrained(tmp_path)
    LSTM(C, H).save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(UsageError, match="model.safetensors: is damaged or no safetensors file"):
        from_pretrained(tmp_path)
    # A pickle in its place is not read as one.
    torch.save(LSTM(C, H).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="model.safetensors: is damaged or no safetensors file"):
        from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="model.safetensors: is no regular file"):
        from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="model.safetensors: is damaged or no .*No such file"):
        from_pretrained(tmp_path)
