"""Evaluation of character language models: protocols, the text each scores, and the figures it prints."""

import math

import numpy as np
import pytest
import torch
from fairseq.sequence_scorer import SequenceScorer
from helpers.tiny_char_lm import (
    TEST,
    TRAIN,
    VALID,
    build_model,
    build_task,
    direct_bpc,
    write_corpus,
)

from rhhn_fairseq import plugin as compat
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.evaluation import Protocol


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def _evaluate(task, models, split="test", **options):
    """The batches of fairseq-eval-lm through fairseq's scorer; the tally and its float32 sum."""
    task.load_dataset(split)
    scorer = SequenceScorer(task.target_dictionary, options.pop("softmax_batch", None))
    batches = task.eval_lm_dataloader(task.dataset(split), **options)
    total, count = 0.0, 0
    for sample in batches:
        for (hypothesis,) in scorer.generate(models, sample):
            scores = hypothesis["positional_scores"]
            total -= scores[torch.isfinite(scores)].double().sum().item()
            count += int(torch.isfinite(scores).sum())
    return batches.tally, total / math.log(2) / count


def test_carry_scores_the_same_in_any_chunks(corpus):
    found = []
    for T in (1, 7, 100):
        task = build_task(corpus, tokens_per_sample=T)
        tally, fairseq_bpc = _evaluate(task, [build_model(task)])
        assert tally.scored == len(TEST) and tally.unknown == 0
        assert abs(tally.bpc - fairseq_bpc) < 1e-6
        found.append(tally.bpc)
    task = build_task(corpus)
    direct = direct_bpc(task, build_model(task), TEST)
    # Each of the scores has float32's rounding, 1e-7 of a few bits; chunks differ in their GEMMs.
    assert max(abs(bpc - direct) for bpc in found) < 1e-6


def test_symbols_and_scores_of_the_scorer_belong_together(corpus):
    """leave_out_symbols_without_a_score: the unknown symbols of the validation split have none."""
    compat.apply()
    task = build_task(corpus, protocol="carry", tokens_per_sample=16)
    task.load_dataset("valid")
    scorer, symbols = SequenceScorer(task.target_dictionary), []
    for sample in task.eval_lm_dataloader(task.dataset("valid")):
        for (hypothesis,) in scorer.generate([build_model(task)], sample):
            assert len(hypothesis["tokens"]) == len(hypothesis["positional_scores"])
            assert hypothesis["positional_scores"].isfinite().all()
            symbols += hypothesis["tokens"].tolist()
    assert len(symbols) == sum(symbol in TRAIN for symbol in VALID) < len(VALID)


@pytest.mark.parametrize("protocol", ["carry:3", "window:20/15", "window:50/0"])
@pytest.mark.parametrize("split, text", [("test", TEST), ("valid", VALID)])
def test_every_protocol_scores_every_known_symbol(corpus, protocol, split, text):
    task = build_task(corpus, protocol=protocol, tokens_per_sample=16)
    tally, fairseq_bpc = _evaluate(task, [build_model(task)], split, batch_size=4)
    unknown = sum(symbol not in TRAIN for symbol in text)
    assert tally.unknown == unknown and tally.scored == len(text) - unknown
    assert abs(tally.bpc - fairseq_bpc) < 1e-5
    assert f"{tally.scored:,} of {len(text):,} symbols scored" in tally.summary(len(text))


def test_figures_so_far_are_told_while_it_runs(corpus, monkeypatch, caplog):
    monkeypatch.setattr("rhhn_fairseq.tasks.evaluation.PROGRESS_SECONDS", 0)
    caplog.set_level("INFO", "rhhn_fairseq.tasks.evaluation")
    task = build_task(corpus, tokens_per_sample=16)
    tally, _ = _evaluate(task, [build_model(task)])
    told = [message for message in caplog.messages if message.startswith("so far: ")]
    assert f" 16 of {len(TEST):,} symbols scored" in told[0]
    assert told[-1] == f"so far: {tally.summary(len(TEST))}"


def test_lanes_with_context_come_near_one_lane(corpus):
    """With 1,000 symbols read before each lane the state is what one lane has: here, exactly."""
    task = build_task(corpus, protocol="carry:3")
    tally, _ = _evaluate(task, [build_model(task)])
    direct = direct_bpc(task, build_model(task), TEST)
    assert abs(tally.bpc - direct) < 1e-6


def test_window_is_the_definition(corpus):
    task = build_task(corpus, protocol="window:12/8")
    model = build_model(task).eval()
    tally, _ = _evaluate(task, [model], batch_size=5)
    entries = torch.from_numpy(task.vocabulary.encode(TEST))
    inputs = torch.cat([torch.tensor([task.first_input]), entries[:-1]])
    nats = 0.0
    for start in range(0, len(entries) - 8, 4):
        part = slice(start, start + 12)
        with torch.no_grad():
            logs = model(inputs[part].unsqueeze(0))[0][0].log_softmax(-1)
        scores = logs.gather(1, entries[part].unsqueeze(1)).flatten().double()
        nats -= (scores if start == 0 else scores[8:]).sum().item()
    assert abs(tally.nats - nats) < 1e-4


def test_ensembles_average_probabilities(corpus):
    task = build_task(corpus)
    models = [build_model(task, seed=seed).eval() for seed in (0, 1)]
    tally, fairseq_bpc = _evaluate(task, models)
    assert abs(tally.bpc - fairseq_bpc) < 1e-5
    alone = [_evaluate(task, [model])[0].bpc for model in models]
    assert tally.bpc < sum(alone) / 2, "averaging probabilities is better than averaging their logs"
    entries = torch.from_numpy(task.vocabulary.encode(TEST))
    inputs = torch.cat([torch.tensor([task.first_input]), entries[:-1]]).unsqueeze(0)
    with torch.no_grad():
        mean = sum(model(inputs)[0][0].softmax(-1) for model in models) / 2
    direct = -mean.gather(1, entries.unsqueeze(1)).double().log2().mean().item()
    assert abs(tally.bpc - direct) < 1e-6
    assert tally.correct == int((mean.argmax(-1) == entries).sum())


def test_protocols_are_read():
    assert Protocol.parse("carry") == Protocol("carry", lanes=1, context=1000)
    assert Protocol.parse("carry:8") == Protocol("carry:8", lanes=8, context=1000)
    assert Protocol.parse("window:100/95") == Protocol("window:100/95", window=100, context=95)
    for text in ("carry:", "carry:x", "window:5", "window:0/0", "", "window:5/6"):
        with pytest.raises(UsageError):
            Protocol.parse(text)


@pytest.mark.parametrize("groups, lanes", [(1, 2), (3, 3)])
def test_short_texts_get_fewer_lanes(groups, lanes):
    cutter = Protocol.parse("carry:8").cut(np.full(50, 4), 2, 20, 4, groups)
    assert len(cutter.scored_from) == lanes


@pytest.mark.parametrize("protocol", ["carry:32", "window:100/50"])
@pytest.mark.parametrize("entries", [50, 190_000])
def test_a_large_vocabulary_makes_batches_smaller(protocol, entries):
    cutter = Protocol.parse(protocol).cut(np.full(20_000, 4), 2, 100, 64, entries=entries)
    shapes = [cutter.batch(number).targets.shape for number in range(len(cutter))]
    most = max(math.prod(shape) for shape in shapes)
    # 32 lanes of 100 symbols of the large vocabulary would be 608 million logits.
    assert most * entries <= 1 << 26
    # With a small one, every batch is as large as it was asked for.
    assert entries > 50 or most >= 32 * 100
