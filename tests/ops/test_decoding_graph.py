"""Beam search by a step that is one graph: the same hypotheses, few graphs, nothing left behind.

The graph is imitated on the CPU, see graph_imitation.py.
"""

import gc
import logging
import weakref

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers.graph_imitation import count, imitate, imitated_graphs
from helpers.tiny_translation import random_model, random_sentences

from rhhn_fairseq.layers import decoding
from rhhn_fairseq.ops import policy
from rhhn_fairseq.ops.backends import graphs


@pytest.fixture
def told(monkeypatch, caplog):
    """What decoding says of its graphs."""
    monkeypatch.setenv(policy.CUDA_GRAPHS, "1")
    decoding._log_once.cache_clear()
    caplog.set_level(logging.INFO, logger="rhhn_fairseq.layers.decoding")
    return lambda: [record.message for record in caplog.records if record.name == decoding.__name__]


@pytest.fixture
def imitated(monkeypatch, told):
    imitated_graphs(monkeypatch)


def _hypotheses(models, dictionary, sample, beam=3):
    results = SequenceGenerator(models, dictionary, beam_size=beam, max_len_b=9).generate(models, sample)
    return [
        (one["tokens"].tolist(), one["score"].item(), one["alignment"]) for some in results for one in some
    ]


def _assert_same(results, expected):
    """The generator keeps scores in float32."""
    assert [tokens for tokens, *_ in results] == [tokens for tokens, *_ in expected]
    torch.testing.assert_close([s for _, s, _ in results], [s for _, s, _ in expected], rtol=0, atol=2e-6)


VARIANTS = {
    "lstm": {},
    "paper": dict(attention="paper", attention_score="additive", decoder_start="zeros"),
    "hyperlstm": dict(arch="hyperlstm_gnmt_small", ends=8.0, hyper_size=4, hyper_embed_size=2),
    "hyperrhn": dict(arch="hyperrhn_gnmt_small", hyper_size=4, share_embeddings="all"),
    "gru": dict(cell="gru", forget_bias=None, decoder_layers=3, residual_from=3),
}


@pytest.mark.parametrize("variant", [*VARIANTS, "ensemble"])
def test_hypotheses_are_the_same(variant, imitated, monkeypatch):
    model, dictionary = random_model(**VARIANTS.get(variant, {}))
    models = [model, random_model(2)[0]] if variant == "ensemble" else [model]
    # Sentences that end at different steps, in batches of different shapes.
    samples = [random_sentences(lengths, dictionary) for lengths in ([4, 9, 2, 7, 5], [17, 3], [6])]
    samples.append(samples[0])
    results = [_hypotheses(models, dictionary, sample) for sample in samples]
    assert all(count(decoding._recordings[one.decoder]) > 0 for one in models)
    monkeypatch.setenv(policy.CUDA_GRAPHS, "0")
    expected = [_hypotheses(models, dictionary, sample) for sample in samples]
    assert len({len(tokens) for some in expected for tokens, *_ in some}) > 2
    for one, other in zip(results, expected, strict=True):
        _assert_same(one, other)


def test_batches_share_graphs(imitated):
    model, dictionary = random_model()
    for seed, lengths in enumerate(([4, 9, 2, 7], [12, 3, 5], [16, 16, 16, 16], [3, 3, 3])):
        _hypotheses([model], dictionary, random_sentences(lengths, dictionary, seed))
    # Four sentences of sixteen positions, and what is left of them: two and one.
    assert count(decoding._recordings[model.decoder]) <= 3
    assert len(decoding._recordings[model.decoder].met) <= 3


def test_kernels_have_graphs_of_their_own(imitated, monkeypatch):
    """What has been recorded goes on with the kernels of that time."""
    model, dictionary = random_model()
    sample, counts = random_sentences([4, 6], dictionary), []
    for name in ("aten", "reference", "aten"):
        monkeypatch.setenv("RHHN_KERNEL", name)
        for _ in range(2):
            _hypotheses([model], dictionary, sample)
        counts.append(count(decoding._recordings[model.decoder]))
    assert counts == [counts[0], 2 * counts[0], 2 * counts[0]]


def test_other_weights_and_no_weights(imitated, monkeypatch):
    model, dictionary = random_model()
    sample = random_sentences([4, 6], dictionary)
    _hypotheses([model], dictionary, sample)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    changed = _hypotheses([model], dictionary, sample)
    before = len(decoding._recordings[model.decoder].met)
    model.float()
    moved = _hypotheses([model], dictionary, sample)
    assert len(decoding._recordings[model.decoder].met) > before
    monkeypatch.setenv(policy.CUDA_GRAPHS, "0")
    assert [tokens for tokens, *_ in moved] == [t for t, *_ in _hypotheses([model], dictionary, sample)]
    _assert_same(changed, _hypotheses([model.double()], dictionary, sample))


def test_graphs_go_with_their_module():
    module = torch.nn.Linear(1, 1)
    graph = graphs.Recording([], (), replay=lambda: None, settle=lambda: None)
    decoding._recordings.setdefault(module, graphs.Recordings(imitate)).kept["place", "key"] = graph
    watched = weakref.ref(graph)
    del module, graph
    gc.collect()
    assert watched() is None


def test_not_in_training_for_gradients_or_under_autocast(imitated, told):
    """Autocast keeps copies of the weights for as long as it lasts; a graph would go on reading them."""
    model, dictionary = random_model()
    sample = random_sentences([4, 6], dictionary)
    tokens = torch.tensor([[dictionary.eos()], [dictionary.eos()]])
    for train, graph in ((True, False), (False, True)):
        model.train(train)
        with torch.set_grad_enabled(graph):
            memory, state = model.encoder(**sample["net_input"]), {}
            for _ in range(4):
                model.decoder(tokens, memory, incremental_state=state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _hypotheses([model.float()], dictionary, sample)
    assert model.decoder not in decoding._recordings
    _hypotheses([model], dictionary, sample)
    assert told() == [
        "decoding steps run without CUDA graphs, which autocast does not support",
        "decoding steps run as CUDA graphs",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_on_a_gpu(variant, monkeypatch):
    monkeypatch.setenv(policy.CUDA_GRAPHS, "1")
    model, dictionary = random_model(**VARIANTS[variant])
    model.cuda()
    sample = random_sentences([4, 9, 2, 7, 5], dictionary)
    sample = {"net_input": {key: value.cuda() for key, value in sample["net_input"].items()}}
    results = [_hypotheses([model], dictionary, sample) for _ in range(2)]
    assert count(decoding._recordings[model.decoder]) > 0
    monkeypatch.setenv(policy.CUDA_GRAPHS, "0")
    for one in results:
        _assert_same(one, _hypotheses([model], dictionary, sample))
