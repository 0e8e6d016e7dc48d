"""Checkpoints as directories of safetensors, and back: no weight changes."""

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from helpers import golden_models, tiny_char_lm

from rhhn_fairseq.cli import convert
from rhhn_fairseq.cli import running as cli
from rhhn_fairseq.cli.convert import to_checkpoint, to_directory
from rhhn_fairseq.data.text.corpora import text_files
from rhhn_fairseq.data.text.prepare import prepare
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.nn import LSTM, from_pretrained
from rhhn_fairseq.saving import rename_old

CONVERTED = ("char_lm", "handwriting")
NAMES = [name for name in golden_models.NAMES if golden_models.kind_of(name) in CONVERTED]


@pytest.fixture(scope="module")
def data_directories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conversion")
    for kind in CONVERTED:
        (folder / kind).mkdir()
    return {kind: str(golden_models.data_directory(kind, folder / kind)) for kind in CONVERTED}


def equal(one, other) -> bool:
    """Whether two state dicts have the same names, types and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_logits_are_the_same_there_and_back(name, data_directories, tmp_path):
    data = data_directories[golden_models.kind_of(name)]
    there = [golden_models.checkpoint(name), "--data", data, "--output", tmp_path / "saved"]
    back = [tmp_path / "saved", "--data", data, "--output", tmp_path / "back.pt"]
    for arguments in (there, back):
        convert.main([str(argument) for argument in arguments])
    (model,), cfg, task = load_model_ensemble_and_task([str(tmp_path / "back.pt")])
    assert task.cfg.data == data
    # fairseq-validate builds it.
    assert type(task.build_criterion(cfg.criterion)).__name__ in ("CharCrossEntropy", "MixtureDensity")
    first = torch.load(golden_models.checkpoint(name), weights_only=False)["model"]
    rename_old(first)
    assert equal(model.state_dict(), first) and equal(from_pretrained(tmp_path / "saved").state_dict(), first)
    expected = torch.load(golden_models.expected(name), weights_only=True)
    with torch.no_grad():
        logits = golden_models.logits_of(model.eval()(**expected["inputs"]))
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-6)


def test_options_of_a_training_come_back(data_directories, tmp_path):
    data = data_directories["char_lm"]
    options = {"embed_dim": 3, "embedding_dropout": 0.25, "layers": 2, "residual_from": 2, "zoneout": 0.1}
    model = tiny_char_lm.build_model(tiny_char_lm.build_task(data), **options)
    tiny_char_lm.save(model, data, tmp_path / "checkpoint.pt", **options)
    to_directory(tmp_path / "checkpoint.pt", tmp_path / "saved")
    config = to_checkpoint(tmp_path / "saved", data)["cfg"]["model"]
    assert {name: config[name] for name in options} == options


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["EMPTY", "--data", "x"], "config.json"),
        (["LAYER", "--data", "x"], "holds LSTM; checkpoints are of characters or handwriting"),
        (["WEIGHTS"], "WEIGHTS is not a fairseq checkpoint: it holds no 'model'"),
        (["GNMT"], "GNMT holds no character or handwriting model"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_one_line(arguments, message, tmp_path, capsys):
    LSTM(3, 4).save_pretrained(tmp_path / "layer")
    (tmp_path / "empty").mkdir()
    torch.save({"embed.weight": torch.ones(2, 2)}, tmp_path / "weights.pt")
    places = {
        "LAYER": tmp_path / "layer",
        "EMPTY": tmp_path / "empty",
        "WEIGHTS": tmp_path / "weights.pt",
        "GNMT": golden_models.checkpoint(next(name for name in golden_models.NAMES if "gnmt" in name)),
        "OUTPUT": tmp_path / "output",
    }
    given = [str(places.get(word, word)) for word in [*arguments, "--output", "OUTPUT"]]
    assert cli.run(lambda: convert.main(given)) == 1
    for name, place in places.items():
        message = message.replace(name, str(place))
    refused = capsys.readouterr().err
    assert message in refused and refused.startswith("error: ") and refused.count("\n") == 1
    assert not (tmp_path / "output").exists()


def test_data_with_other_symbols_are_refused(data_directories, tmp_path):
    name = next(name for name in NAMES if golden_models.kind_of(name) == "char_lm")
    to_directory(golden_models.checkpoint(name), tmp_path / "saved", data_directories["char_lm"])
    (tmp_path / "text").write_text("xyz\n" * 9)
    files = {split: [tmp_path / "text"] for split in ("train", "valid", "test")}
    other = tmp_path / "other"
    prepare(text_files(files, as_bytes=False), other)
    with pytest.raises(UsageError, match=f"--data {other}: has other symbols"):
        to_checkpoint(tmp_path / "saved", str(other))
