"""Checkpoints written before cells and kernels were rebuilt load, and give the logits they gave then."""

import collections

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from helpers import golden_models

from rhhn_fairseq import plugin  # noqa: F401  (registers the models)

# The code that wrote the files differs by 0, and by 4.8e-7 where it runs the loop over `step` instead. The
# logits are below 3.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def data_directories(tmp_path_factory):
    """The data directory of each kind of model, None where it reads no data."""
    folder = tmp_path_factory.mktemp("golden")
    kinds = sorted({golden_models.kind_of(name) for name in golden_models.NAMES})
    for kind in kinds:
        (folder / kind).mkdir()
    return {kind: golden_models.data_directory(kind, folder / kind) for kind in kinds}


def test_every_model_has_files():
    kinds = collections.Counter(golden_models.kind_of(name) for name in golden_models.NAMES)
    assert kinds == {"char_lm": 16, "gnmt": 6, "handwriting": 4, "classifier": 3}


@pytest.mark.parametrize("name", golden_models.NAMES)
def test_gives_the_same_logits(name, data_directories):
    data = data_directories[golden_models.kind_of(name)]
    path = str(golden_models.checkpoint(name))
    (model,), _, _ = load_model_ensemble_and_task([path], {"data": data} if data else None)
    expected = torch.load(golden_models.expected(name), weights_only=True)
    with torch.no_grad():
        logits = golden_models.logits_of(model.eval()(**expected["inputs"]))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=TOLERANCE)
