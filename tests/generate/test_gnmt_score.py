"""GNMT's score and pruning against a slow scorer and a slow search that follow the paper's text."""

import math
from argparse import Namespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqEncoder, FairseqEncoderDecoderModel, FairseqIncrementalDecoder
from fairseq.sequence_generator import SequenceGenerator
from hypothesis import given, settings
from hypothesis import strategies as st

import rhhn_fairseq.plugin  # noqa: F401
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.generate.gnmt_score import GNMTScore
from rhhn_fairseq.tasks.gnmt_translation import GNMTTranslationConfig, GNMTTranslationTask

WORDS = 6


def slow_score(log_probs, attention, alpha, beta):
    """Equation 14 of Wu et al. 2016, word by word. attention: one list of weights for every step."""
    total = 0.0
    for log_prob in log_probs:
        total += log_prob
    length_penalty = (5 + len(log_probs)) ** alpha / (5 + 1) ** alpha
    coverage = 0.0
    for i in range(len(attention[0])):
        looked_at = 0.0
        for step in attention:
            looked_at += step[i]
        coverage += math.log(min(looked_at, 1.0))
    return total / length_penalty + beta * coverage


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(0, 3),
    st.floats(0, 2),
    st.floats(0, 2),
    st.integers(0, 10**6),
)
def test_score_equals_the_slow_one(length, source, padding, alpha, beta, seed):
    draw = torch.Generator().manual_seed(seed)
    log_probs = torch.rand(length, generator=draw, dtype=torch.float64).log()
    attention = torch.randn(source, length, generator=draw, dtype=torch.float64).mul(3).softmax(0)
    padded = torch.cat([torch.zeros(padding, length, dtype=torch.float64), attention])
    real = torch.arange(padding + source) >= padding
    found = GNMTScore(alpha, beta).finished(log_probs.sum(), length, padded, real)
    expected = slow_score(log_probs.tolist(), attention.T.tolist(), alpha, beta)
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_symbol_never_looked_at_costs_a_finite_sum():
    attention = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    score = GNMTScore(0.0, 0.2).finished(torch.tensor(-1.0), 2, attention, torch.tensor([True, True]))
    assert -1 - 0.2 * 90 < score < -1 - 0.2 * 80


def test_without_attention_only_the_coverage_is_impossible():
    nothing, real = torch.empty(0), torch.tensor([True])
    assert GNMTScore(1.0).finished(torch.tensor(-4.0), 7, nothing, real).item() == -2
    with pytest.raises(UsageError, match="--coverage-penalty 0.2 needs attention"):
        GNMTScore(1.0, 0.2).finished(torch.tensor(-4.0), 7, nothing, real)


@pytest.mark.parametrize("text", ["gnmt:nan", "wu:0.2"])
def test_unknown_length_penalties_are_refused(text):
    with pytest.raises(
        UsageError, match=f"--length-penalty {text} is unknown, choose from fairseq, none, gn"
    ):
        GNMTScore.parse(text, 0.0, 1.0)


# A model whose next-word distribution and attention depend on the sentence and the words before: every
# beam search over it can be done by hand.


class _Encoder(FairseqEncoder):
    def forward(self, src_tokens, src_lengths=None):
        return src_tokens

    def reorder_encoder_out(self, encoder_out, new_order):
        return encoder_out.index_select(0, new_order)


class _Decoder(FairseqIncrementalDecoder):
    def __init__(self, dictionary, peak):
        super().__init__(dictionary)
        self.peak = peak

    def one(self, source, words):
        """Log-probabilities and attention of one sentence after the given words."""
        real = source != 1
        seed = hash((*source[real].tolist(), *words)) % 2**31
        draw = torch.Generator().manual_seed(seed)
        logits = torch.randn(4 + WORDS, generator=draw) * self.peak
        logits[[0, 1, 3]] = -1e4
        energy = torch.randn(int(real.sum()), generator=draw) * 2
        attention = torch.zeros(len(source))
        attention[real] = energy.softmax(0)
        return logits.log_softmax(0), attention

    def forward(self, prev_output_tokens, encoder_out=None, incremental_state=None, **unused):
        rows = [
            self.one(*row)
            for row in zip(encoder_out, (r[1:] for r in prev_output_tokens.tolist()), strict=True)
        ]
        logits, attention = (torch.stack(part) for part in zip(*rows, strict=True))
        return logits.unsqueeze(1), {"attn": [attention.unsqueeze(1)]}

    def max_positions(self):
        return 100


def _toy(peak=1.5):
    dictionary = Dictionary()
    for n in range(WORDS):
        dictionary.add_symbol(f"w{n}")
    return FairseqEncoderDecoderModel(_Encoder(dictionary), _Decoder(dictionary, peak)), dictionary


def _task(dictionary, tmp_path, **options):
    return GNMTTranslationTask(GNMTTranslationConfig(data=str(tmp_path), **options), dictionary, dictionary)


def _sources():
    rows = [[4, 5, 6, 2], [7, 2], [9, 8, 2], [5, 2]]
    return torch.tensor([[1] * (4 - len(row)) + row for row in rows])


def slow_beam(model, source, beam, max_len, alpha, beta, threshold=None):
    """Beam search for one sentence with lists: the translations found, with the paper's score."""
    active, finished, best = [((), 0.0, [])], [], -math.inf
    normal = lambda total, length: total / ((5 + length) / 6) ** alpha  # noqa: E731
    for step in range(max_len + 1):
        candidates = []
        for words, total, attention in active:
            log_probs, weights = model.decoder.one(source, words)
            top = log_probs.max().item() if step < max_len else log_probs[2].item()
            for word, log_prob in enumerate(log_probs.tolist()):
                if word == 1 or (step == 0 and word == 2) or (step == max_len and word != 2):
                    continue
                after = total + log_prob
                candidates.append(
                    [after, word, words, [*attention, weights], log_prob < top - (threshold or math.inf)]
                )
        if threshold is not None:
            first = max(c[0] for c in candidates)
            for c in candidates:
                behind = normal(c[0], step + 1) < best - threshold
                c[4] = (c[4] or behind) and c[0] < first
        candidates = sorted((c for c in candidates if not c[4]), key=lambda c: -c[0])
        going_on = [c for c in candidates[: 2 * beam] if c[1] != 2][:beam]
        for total, word, words, attention, _ in candidates[:beam]:
            if word == 2 and len(finished) < beam:
                rows = torch.stack(attention)[:, source != 1].tolist()
                log_probs = [total]
                finished.append((slow_score_of(log_probs, rows, len(words) + 1, alpha, beta), (*words, 2)))
                best = max(best, normal(total, len(words) + 1))
        if len(finished) == beam or not going_on:
            break
        active = [((*words, word), total, attention) for total, word, words, attention, _ in going_on]
    return sorted(finished, key=lambda pair: -pair[0])


def slow_score_of(log_probs, attention, length, alpha, beta):
    """``slow_score`` when only the sum of the log-probabilities is at hand."""
    return slow_score([*log_probs, *[0.0] * (length - 1)], attention, alpha, beta)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from([0.0, 0.2, 0.7]),
    st.sampled_from([None, 0.3, 1.0, 3.0]),
    st.sampled_from([0.5, 1.5, 4.0]),
)
def test_beam_search_finds_and_scores_what_the_slow_search_does(beam, alpha, beta, threshold, peak):
    model, dictionary = _toy(peak)
    options = {"length_penalty": f"gnmt:{alpha}", "coverage_penalty": beta}
    task = _task(dictionary, "/nowhere", beam_size_threshold=threshold or 0.0, **options)
    generator = task.build_generator([model], Namespace(beam=beam, max_len_b=5))
    sources = _sources()
    sample = {"id": torch.tensor([30, 10, 20, 40]), "net_input": {"src_tokens": sources}}
    found = task.inference_step(generator, [model], sample)
    for source, hypotheses in zip(sources, found, strict=True):
        expected = slow_beam(model, source, beam, 5, alpha, beta, threshold)
        assert [tuple(h["tokens"].tolist()) for h in hypotheses] == [words for _, words in expected]
        for hypothesis, (score, _) in zip(hypotheses, expected, strict=True):
            # Measured: 1.2e-6, of float32 sums.
            assert hypothesis["score"].item() == pytest.approx(score, abs=1e-5)


def test_the_default_finds_what_fairseqs_own_generator_finds(tmp_path):
    model, dictionary = _toy()
    task, arguments = _task(dictionary, tmp_path), Namespace(beam=3, max_len_b=5, lenpen=0.6)
    sample = {"id": torch.arange(4), "net_input": {"src_tokens": _sources()}}
    generators = [task.build_generator([model], arguments, kind) for kind in (None, SequenceGenerator)]
    ours, theirs = (task.inference_step(generator, [model], sample) for generator in generators)
    for row, expected in zip(ours, theirs, strict=True):
        assert [h["tokens"].tolist() for h in row] == [h["tokens"].tolist() for h in expected]
        assert [float(h["score"]) for h in row] == pytest.approx(
            [float(h["score"]) for h in expected], abs=1e-5
        )


@pytest.mark.parametrize(
    "options, arguments, message",
    [
        ({"beam_size_threshold": 2.0}, {"sampling": True}, "does not go with --sampling"),
        ({"beam_size_threshold": 2.0}, {"diverse_beam_groups": 2}, "not go with --diverse-beam-groups"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, options, arguments, message):
    model, dictionary = _toy()
    with pytest.raises(UsageError, match=message):
        _task(dictionary, tmp_path, **options).build_generator([model], Namespace(beam=2, **arguments))
