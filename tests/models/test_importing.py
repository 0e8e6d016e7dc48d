"""Checkpoints as directories of safetensors, and back: the logits are the same."""

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from helpers import golden_models

from rhhn_fairseq import plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.commands import import_model
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.exporting import export
from rhhn_fairseq.importing import to_checkpoint
from rhhn_fairseq.nn import LSTM

CONVERTED = ("char_lm", "handwriting")
NAMES = [name for name in golden_models.NAMES if golden_models.kind_of(name) in CONVERTED]


@pytest.fixture(scope="module")
def data_directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("importing")
    for kind in CONVERTED:
        (folder / kind).mkdir()
    return {kind: str(golden_models.data_directory(kind, folder / kind)) for kind in CONVERTED}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same_there_and_back(name, data_directories, tmp_path):
    data = data_directories[golden_models.kind_of(name)]
    export(golden_models.checkpoint(name), tmp_path / "saved", data, "float32")
    import_model.main([str(tmp_path / "saved"), str(tmp_path / "back.pt"), "--data", data])
    (model,), _, task = load_model_ensemble_and_task([str(tmp_path / "back.pt")])
    assert task.cfg.data == data
    expected = torch.load(golden_models.expected(name), weights_only=True)
    with torch.no_grad():
        logits = golden_models.logits_of(model.eval()(**expected["inputs"]))
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-6)


def test_what_cannot_be_imported_is_refused_in_one_line(tmp_path):
    with pytest.raises(UsageError, match="config.json: no such file; rhhn export writes it"):
        to_checkpoint(tmp_path, tmp_path / "back.pt", "data")
    LSTM(3, 4).save_pretrained(tmp_path / "layer")
    with pytest.raises(UsageError, match="config.json: is of no network of characters or strokes"):
        to_checkpoint(tmp_path / "layer", tmp_path / "back.pt", "data")
    assert not (tmp_path / "back.pt").exists()
