"""The benchmark of translation models: what it compares is comparable, and its reports are whole."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
import torch

from rhhn_fairseq.bench import gnmt, gnmt_decode, gnmt_train
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import native

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


@pytest.fixture(scope="module")
def built():
    config = gnmt_train.Config(**gnmt_train.SMOKE, threads=1)
    return config, *gnmt.build_models(config)


def test_every_model_gives_as_many_symbols_as_it_reads(built):
    config, models, dictionary = built
    for count in (1, 3):
        tokens = gnmt.draw_sentences(config, dictionary, count)
        assert tokens.shape == (count, config.length) and (tokens[:, -1] == dictionary.eos()).all()
        for model in models.values():
            # time_generation asserts the number of symbols itself.
            assert gnmt_decode.time_generation(model, tokens, dictionary, beam=2) > 0


def test_training_reaches_all_parameters(built):
    config, models, dictionary = built
    for model in models.values():
        assert gnmt_train.time_training(model, gnmt.draw_sentences(config, dictionary, 2)) > 0
        assert all(p.grad is not None for p in model.parameters())


def test_fairseqs_model_is_that_of_the_documented_comparison(built):
    model = built[1][gnmt.FAIRSEQ]
    assert model.encoder.lstm.bidirectional and model.encoder.lstm.hidden_size == 256
    assert [layer.hidden_size for layer in model.decoder.layers] == [512, 512]
    assert model.decoder.embed_tokens.embedding_dim == 256


def test_models_run_on_what_makes_a_difference(built):
    config, models, _ = built
    assert gnmt.backends_of(models[gnmt.FAIRSEQ], config) == ["torch"]
    assert gnmt.backends_of(models["lstm_gnmt_small"], config) == ["preferred", "reference"]
    asked = dataclasses.replace(config, backends=("aten", "preferred"))
    assert gnmt.backends_of(models["lstm_gnmt_small"], asked) == ["aten", "preferred"]
    asked = dataclasses.replace(config, backends=("triton",))
    with pytest.raises(UsageError, match="--backends triton does not run all .*aten"):
        gnmt.backends_of(models["lstm_gnmt_small"], asked)


@pytest.mark.parametrize("attention, expected", [("own", "v2"), ("paper", "paper"), ("v2", "v2")])
def test_attention(attention, expected, monkeypatch):
    built = []
    model = gnmt.MODEL_REGISTRY["lstm_gnmt_small"]
    build = model.build_model
    monkeypatch.setattr(
        model, "build_model", lambda cfg, task: built.append(cfg.attention) or build(cfg, task)
    )
    gnmt.build_models(gnmt_train.Config(**gnmt_train.SMOKE, attention=attention))
    assert built == [expected]


def test_types():
    """Models are checked in float32 and in the type, and timed in that."""
    report = gnmt_train.run(gnmt_train.Config(**gnmt_train.SMOKE, threads=1, dtype="bfloat16"))
    assert all(row["dtype"] == "bfloat16" and 1e-4 < row["error"] < 0.5 for row in report["rows"])
    with pytest.raises(UsageError, match="dtype='half' is unknown, choose from float32, bfloat16"):
        gnmt_train.Config(dtype="half")


@pytest.mark.skipif(not native.multiplies(), reason="needs the compiled kernels and AVX2")
def test_wrong_products_of_decoding_are_found(monkeypatch):
    """They are of no use in training, which a check of training would not see."""
    product = native.multiply_few_rows

    def wrong(x, w, out, add):
        product(x, w, out, add)
        out.mul_(1.05)

    monkeypatch.setattr(native, "multiply_few_rows", wrong)
    gnmt_train.run(gnmt_train.Config(**gnmt_train.SMOKE, threads=1))
    with pytest.raises(UsageError, match="lstm_gnmt_small preferred is wrong .*scores of 1 sentences"):
        gnmt_decode.run(gnmt_decode.Config(**gnmt_decode.SMOKE, threads=1))


def test_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gnmt_decode, "BATCHES", (1, 2))
    main = runpy.run_path(str(SCRIPT))["main"]
    path = tmp_path / "report.json"
    pairs = [(gnmt.FAIRSEQ, "torch"), ("lstm_gnmt_small", "preferred"), ("lstm_gnmt_small", "reference")]
    for command, counts, counted in (("gnmt-train", (2,), 2), ("gnmt-decode", (1, 2), 1)):
        main(
            [command, "--smoke", "--threads", "1", "--json", str(path), "--png", str(tmp_path / "report.png")]
        )
        report = json.loads(path.read_text())
        assert report["command"] == command
        assert [(row["model"], row["backend"]) for row in report["rows"]] == pairs * len(counts)
        assert [row["sentences"] for row in report["rows"]] == [n for n in counts for _ in pairs]
        for row in report["rows"]:
            assert row["error"] < 1e-4
            assert row["tokens_per_second"] == pytest.approx(
                3e3 * counted * row["sentences"] / row["total_ms"]
            )
            assert (row["speed_ratio"] == 1.0) == (row["model"] == gnmt.FAIRSEQ)
        assert capsys.readouterr().out.splitlines()[3].startswith("| model ")
        assert torch.__version__ == report["machine"]["torch"]


def test_unknown_architectures_are_refused():
    with pytest.raises(
        UsageError, match="--archs lstm_ptb is not a translation architecture; choose from gnmt, hyperlstm_g"
    ):
        gnmt_train.Config(archs=("lstm_ptb",))


def test_a_beam_that_fairseq_would_narrow_is_refused():
    with pytest.raises(UsageError, match="--beam 20 is too large, it must be below --vocab-size 20"):
        gnmt_decode.Config(beam=20, vocab_size=20)
