"""Dynamic evaluation against a second transcription of its update rule, and what it refuses."""

import copy
import math

import pytest
import torch
from fairseq.sequence_scorer import SequenceScorer
from helpers.tiny_char_lm import TEST, TRAIN, build_model, build_task, iterator, write_corpus
from helpers.tiny_handwriting import disturb

from rhhn_fairseq.data.text.vocabulary import PAD, UNK
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.carry import Carry
from rhhn_fairseq.tasks.dynamic_evaluation import DynamicEvaluation

T, LANES = 16, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def _task(corpus, **options):
    """A task of dynamic evaluation and the model that it built."""
    task = build_task(corpus, tokens_per_sample=T, dynamic_eval=True, **options)
    model = build_model(task).eval()
    # The gradient of a fresh hypernetwork is zero, and its steps would be enormous.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    task.models = [model]
    return task, model


def _bpc(task, models) -> float:
    task.load_dataset("test")
    scorer = SequenceScorer(task.target_dictionary)
    batches = task.eval_lm_dataloader(task.dataset("test"))
    for sample in batches:
        scorer.generate(models, sample)
    assert batches.tally.scored == len(TEST)
    return batches.tally.bpc


def _loss(model, entries, previous, state):
    """The mean loss of a chunk [B, T] in nats, and the state after it."""
    y, state = model.stack(model.embed(previous.T), state, None)
    logs = model.output(y).log_softmax(-1)
    return -logs.gather(2, entries.T.unsqueeze(2)).mean(), tuple(tensor.detach() for tensor in state)


def _chunks(entries, previous, lanes):
    """Chunks of T of equal lanes, as pairs [lanes, T]."""
    length = len(entries) // lanes
    pairs = [x[: lanes * length].view(lanes, length) for x in (entries, previous)]
    return [tuple(x[:, i : i + T] for x in pairs) for i in range(0, length, T)]


def _with_inputs(task, text):
    entries = torch.from_numpy(task.vocabulary.encode(text)).long()
    return entries, torch.cat([torch.tensor([task.first_input]), entries[:-1]])


def _transcribed(task, model, lr, decay, batches) -> float:
    """Bits per character in float64, with the update rule written out."""
    model = copy.deepcopy(model).double()
    start = copy.deepcopy(model)
    weights = list(zip(model.parameters(), start.parameters(), strict=True))
    squares, state = [0.0 for _ in weights], None
    for chunk in _chunks(*_with_inputs(task, TRAIN), LANES)[:batches]:
        loss, state = _loss(model, *chunk, state)
        for k, g in enumerate(torch.autograd.grad(loss, list(model.parameters()))):
            squares[k] = squares[k] + g**2 / batches
    roots = [square.sqrt() for square in squares]
    mean = torch.cat([root.flatten() for root in roots]).mean()
    nats, state = 0.0, None
    for chunk in _chunks(*_with_inputs(task, TEST), 1):
        loss, state = _loss(model, *chunk, state)
        nats += loss.item() * chunk[0].numel()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for (w, w_0), g, root in zip(weights, gradients, roots, strict=True):
                w += (decay * root / mean).clamp(max=1) * (w_0 - w) - lr * g / (root + 2e-5)
    return nats / len(TEST) / math.log(2)


@pytest.mark.parametrize("lr, decay", [(0.0, 0.0), (2e-3, 0.0), (2e-3, 0.05)])
@pytest.mark.parametrize("limit", ["DYNAMIC_LANES", "MOST_LOGITS"])
def test_equals_the_update_rule(corpus, monkeypatch, lr, decay, limit):
    # TRAIN has 612 symbols: lanes of equal length. A large vocabulary makes them fewer.
    entries = len(build_task(corpus).dictionary)
    value = LANES if limit == "DYNAMIC_LANES" else LANES * T * entries
    monkeypatch.setattr(f"rhhn_fairseq.tasks.char_lm.{limit}", value)
    task, model = _task(corpus, dynamic_eval_lr=lr, dynamic_eval_decay=decay, dynamic_eval_batches=5)
    expected = _transcribed(task, model, lr, decay, 5)
    # Scores in float32, 1e-7 of a few bits each, and weights that moved by rounded gradients: 2e-7 measured.
    found = _bpc(task, [model])
    assert abs(found - expected) < 2e-6


def test_it_learns_a_text_that_repeats_itself(corpus):
    task, model = _task(corpus, dynamic_eval_lr=5e-3)
    plain = build_task(corpus, tokens_per_sample=T)
    before = _bpc(plain, [copy.deepcopy(model)])
    assert _bpc(task, [model]) < before - 0.3


def test_nothing_is_read_ahead(corpus):
    """The score of a symbol is the same whatever follows its chunk."""

    def scores(symbols):
        task, model = _task(corpus, dynamic_eval_lr=5e-3)
        task.load_dataset("test")
        dataset = task.dataset("test")
        dataset.stream = dataset.stream[:symbols]
        scorer = SequenceScorer(task.target_dictionary)
        found = [
            scorer.generate([model], s)[0][0]["positional_scores"] for s in task.eval_lm_dataloader(dataset)
        ]
        return torch.cat(found)

    assert torch.equal(scores(5 * T)[: 3 * T], scores(3 * T))


def test_other_protocols_are_refused(corpus):
    with pytest.raises(UsageError, match="--protocol carry, not carry:2"):
        build_task(corpus, dynamic_eval=True, protocol="carry:2")


def test_ensembles_and_half_precision_are_refused(corpus):
    task, model = _task(corpus)
    task.models = [model, model]
    with pytest.raises(UsageError, match="trains one model, --path names 2"):
        _bpc(task, [model])
    task.models = [model.half()]
    with pytest.raises(UsageError, match="the model is in float16"):
        _bpc(task, [model])


def test_unknown_symbols_teach_nothing(corpus):
    """A step on a chunk is the same whether its unknown targets are marked or left out."""
    task = build_task(corpus, valid_protocol="carry", tokens_per_sample=T)
    sample = next(iter(iterator(task, "valid").next_epoch_itr()))
    model = disturb(build_model(task).eval(), 0.1)
    target, moved = sample["target"], []
    assert (target == UNK).any()
    for each in (target, target.masked_fill(target == UNK, PAD)):
        # Both have the root mean squares of the same sample.
        learner = DynamicEvaluation(copy.deepcopy(model), 1e-2, 0.0, [sample])
        carried = sample["net_input"] | {"carry": Carry().open(0)}
        learner.learn(sample | {"target": each, "net_input": carried})
        moved.append(torch.cat([parameter.detach().flatten() for parameter in learner.parameters]))
    torch.testing.assert_close(*moved, rtol=0, atol=0)
