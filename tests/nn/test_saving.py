"""Cells and layers saved to a directory and loaded again."""

import json
import sys

import pytest
import torch

from rhhn_fairseq.cells import CELLS, build_cell, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.nn import (
    LSTM,
    LNHyperLSTM,
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


def test_another_class_is_refused(tmp_path):
    LSTM(C, H).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="holds a LSTM, not a LNHyperLSTM"):
        LNHyperLSTM.from_pretrained(tmp_path)


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Linear is neither a cell nor a layer"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(UsageError, match="the LSTM is quantised; save it before that"):
        save_pretrained(quantize_dynamic(LSTM(C, H), smallest=1), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/saved: cannot be made"):
        save_pretrained(LSTM(C, H), tmp_path / "file" / "saved")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"kind": "tree"}, "config.json: kind='tree' is unknown, choose from cell, layer"),
        ({"format": 2}, "config.json: format=2 is unknown, this version reads 1"),
        ({"hidden_size": 7}, r"model.safetensors: stack.cells.0.c_gain is \(6,\), and \(7,\) in the module"),
        # Nothing of this size is made before it is compared.
        ({"hidden_size": 1 << 18, "input_size": 1 << 18}, "model.safetensors: stack.cells.0.c_gain is"),
        ({"hidden_size": "6"}, "config.json: .*hidden_size='6' is not a whole number"),
        ({"options": {"colour": 1}}, "config.json: cell ln_hyperlstm has no option 'colour'"),
        ({"cell": "tree"}, "config.json: unknown cell 'tree'"),
        ({"code": "import os"}, "config.json: cell ln_hyperlstm has no option 'code'"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(change, reason, tmp_path):
    LNHyperLSTM(C, H, hyper_size=3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UsageError, match=reason):
        from_pretrained(tmp_path)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    with pytest.raises(UsageError, match="modules need safetensors: pip install safetensors"):
        LSTM(C, H).save_pretrained(tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match="someone/model: no such directory; names on .*hub need"):
        from_pretrained("someone/model")


def test_missing_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such directory"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="config.json: no such file; save_pretrained writes it"):
        from_pretrained(tmp_path)
    LSTM(C, H).save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-5])
    with pytest.raises(UsageError, match="model.safetensors: is damaged or no safetensors file"):
        from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="model.safetensors: no such file"):
        from_pretrained(tmp_path)
