"""The benchmark of translation models: what it compares is comparable, and its report is whole."""

import json

import pytest
import torch

import rhhn_fairseq.plugin  # noqa: F401
from rhhn_fairseq import benchmark_translation as bench
from rhhn_fairseq.errors import UsageError


@pytest.fixture(scope="module")
def built():
    config = bench.TranslationBenchConfig(**bench.SMOKE)
    return config, *bench.build_models(config)


def test_every_model_gives_as_many_symbols_as_it_reads(built):
    config, models, dictionary = built
    for count in (1, 3):
        tokens = bench.sentences(config, dictionary, count)
        assert tokens.shape == (count, config.length) and (tokens[:, -1] == dictionary.eos()).all()
        for model in models.values():
            # time_generation asserts the number of symbols itself.
            assert bench.time_generation(model, tokens, dictionary, beam=2) > 0


def test_training_reaches_all_parameters(built):
    config, models, dictionary = built
    for model in models.values():
        assert bench.time_training(model, bench.sentences(config, dictionary, 2)) > 0
        assert all(p.grad is not None for p in model.parameters())


def test_fairseqs_model_is_that_of_the_documented_comparison(built):
    model = built[1][bench.FAIRSEQ]
    assert model.encoder.lstm.bidirectional and model.encoder.lstm.hidden_size == 256
    assert [layer.hidden_size for layer in model.decoder.layers] == [512, 512]
    assert model.decoder.embed_tokens.embedding_dim == 256


def test_report(tmp_path, capsys, monkeypatch):
    import runpy
    from pathlib import Path

    script = Path(__file__).parents[1] / "scripts" / "bench_translation.py"
    main = runpy.run_path(str(script))["main"]
    main(["--smoke", "--json", str(tmp_path / "times.json")])
    report = json.loads((tmp_path / "times.json").read_text())
    assert list(report["models"]) == [bench.FAIRSEQ, "lstm_gnmt_small"]
    for title in ("training", "generation of 1", "generation of 64"):
        assert report["models"][bench.FAIRSEQ][title]["speed_ratio"] == 1.0
        assert report["models"]["lstm_gnmt_small"][title]["symbols_per_second"] > 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| model | parameters | training |")
    assert torch.__version__ == report["machine"]["torch"]


def test_unknown_architectures_are_refused():
    with pytest.raises(
        UsageError, match="--archs lstm_ptb is no translation architecture, choose from gnmt, hyperlstm_g"
    ):
        bench.TranslationBenchConfig(archs=("lstm_ptb",))
