"""Task, model and criterion of character language models, within one process."""

import math

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from helpers.in_process import Optimizer
from helpers.tiny_char_lm import TRAIN, VALID, build_model, build_task, direct_bpc, iterator, write_corpus
from torch.utils._python_dispatch import TorchDispatchMode

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.cli.describe import build_empty, describe, describe_backends
from rhhn_fairseq.criterions.char_cross_entropy import CharCrossEntropy
from rhhn_fairseq.data.text.corpora import text_files
from rhhn_fairseq.data.text.prepare import prepare
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.nn.character import CharacterNetwork
from rhhn_fairseq.tasks.carry import Carry


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_describe_other_vocabularies_and_unknown_names():
    # 10 more symbols: 10 rows of W_x, 10 columns of the output layer and 10 of its biases.
    assert f"parameters: {4_254_050 + 10 * 4000 + 10 * 1001:,}" in describe("lstm_ptb", 60)
    assert "expected" not in describe("lstm_ptb", 60)
    with pytest.raises(UsageError, match="--arch hyperlstm is unknown, did you mean hyperlstm_ptb"):
        describe("hyperlstm")


def test_backends_of_a_gpu_are_described_without_one():
    text = describe_backends(build_empty("lstm_ptb"), "cuda", torch.bfloat16)
    training, decoding = text.split("LSTM of 1000 units, ")[1:]
    assert training.startswith("training with T=100, B=128 on cuda in bfloat16:\n")
    assert "torch_nn   torch.nn has no recurrent dropout" in training
    assert "* torch_nn" in decoding and "native     native runs on the CPU only" in decoding


def test_backends_on_a_cpu_are_described_without_the_weights():
    config = MODEL_DATACLASS_REGISTRY["lstm_ptb"]()
    real = MODEL_REGISTRY["lstm_ptb"].for_vocabulary(config, 50)
    assert describe_backends(build_empty("lstm_ptb")) == describe_backends(real)


def test_only_symbols_that_occur_have_weights_and_scores(corpus):
    task = build_task(corpus)
    V, D = len(set(TRAIN)), len(task.dictionary)
    assert D == 4 + V - 1
    model = build_model(task).eval()
    assert model.weight_out.shape == (12, V) and model.stack.cells[0].weight_x.shape[0] == V
    tokens = torch.tensor([[task.first_input, 4, 5]])
    logits, _ = model(tokens)
    finite = torch.isfinite(logits[0, 0]).nonzero().flatten().tolist()
    assert finite == sorted(task.vocabulary.model_indices().tolist())
    assert not {task.dictionary.bos(), task.dictionary.pad(), task.dictionary.unk()} & set(finite)
    probabilities = model.get_normalized_probs((logits, {}), log_probs=False)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(1, 3), rtol=0, atol=1e-6)
    logs = model.get_normalized_probs((logits, {}), log_probs=True)
    torch.testing.assert_close(logs.exp(), probabilities, rtol=0, atol=1e-6)


@pytest.mark.parametrize("embed_dim", [0, 7])
def test_input_vectors(corpus, embed_dim):
    task = build_task(corpus)
    model = build_model(task, embed_dim=embed_dim, output_init="orthogonal").eval()
    indices = torch.from_numpy(task.vocabulary.model_indices())
    vectors = model.embed(indices)
    if embed_dim:
        assert torch.equal(vectors, model.embedding)
    else:
        assert torch.equal(vectors, torch.eye(len(indices)))
    specials = torch.tensor([task.dictionary.bos(), task.dictionary.pad(), task.dictionary.unk()])
    assert (model.embed(specials) == 0).all()


def test_a_symbol_of_thousands_needs_no_matrix_of_them_all():
    V = 3000
    vocabulary = CharVocabulary([chr(0x4E00 + n) for n in range(V)], newline_occurs=False)
    network = CharacterNetwork(StackConfig(cell="lstm", input_size=V, hidden_size=2), vocabulary)
    with Recorded() as results:
        vector = network.embed(torch.tensor([10]))
    assert vector.argmax() == network.symbol_of[10]
    assert max(tensor.numel() for tensor in results.seen) <= V


class Recorded(TorchDispatchMode):
    """Keeps the result of every operation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func(*args, **(kwargs or {})))
        return self.seen[-1]


def test_embedding_dropout_drops_whole_symbols_in_training(corpus):
    model = build_model(build_task(corpus), embedding_dropout=0.5).train()
    torch.manual_seed(0)
    tokens = torch.from_numpy(build_task(corpus).vocabulary.model_indices()).repeat(3, 1)
    vectors = model.embed(tokens)
    assert torch.equal(vectors[0], vectors[1])
    assert set(vectors.unique().tolist()) == {0.0, 2.0}
    assert set(model.eval().embed(tokens).unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"data": "???"}, "task.data is not given"),
        ({"protocol": "window:5/5"}, "^--protocol window:5/5 .* CONTEXT below LENGTH"),
        ({"valid_protocol": "all"}, "^--valid-protocol all is not possible: carry, carry:LANES with"),
    ],
)
def test_impossible_tasks_are_refused(corpus, options, reason):
    with pytest.raises(UsageError, match=reason):
        build_task(corpus, **options)


@pytest.mark.parametrize("workers, frequency", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_every_target_is_scored_exactly_once_in_an_epoch(corpus, workers, frequency):
    text = np.concatenate([build_task(corpus).vocabulary.encode(TRAIN)])
    lanes = {}
    for rank in range(workers):
        task = build_task(corpus, tokens_per_sample=7, update_freq=[frequency])
        epoch = iterator(task, workers=workers, rank=rank)
        batches = list(epoch.next_epoch_itr(shuffle=True))
        assert sum(sample["ntokens"] for sample in batches) > 0
        for sample in batches:
            for row, target in enumerate(sample["target"].numpy()):
                lane = sample["group"] * 3 + row
                lanes.setdefault(lane, []).append((sample["chunk"], target[target != 1]))
    assert sorted(lanes) == list(range(3 * workers * frequency))
    for pieces in lanes.values():
        assert [chunk for chunk, _ in pieces] == list(range(len(pieces)))
    read = np.concatenate([part for lane in sorted(lanes) for _, part in lanes[lane]])
    assert (read == text).all()


def test_workers_see_what_one_worker_sees_with_that_update_frequency(corpus):
    one = list(iterator(build_task(corpus, update_freq=[2])).next_epoch_itr())
    two = [list(iterator(build_task(corpus), workers=2, rank=rank).next_epoch_itr()) for rank in range(2)]
    interleaved = [sample for pair in zip(*two, strict=True) for sample in pair]
    assert len(one) == len(interleaved)
    for ours, theirs in zip(one, interleaved, strict=True):
        assert torch.equal(ours["target"], theirs["target"])
        assert (ours["chunk"], ours["group"]) == (theirs["chunk"], theirs["group"])


def test_random_windows_change_with_the_epoch_and_start_from_zeros(corpus):
    task = build_task(corpus, batching="windows", tokens_per_sample=5)
    epoch = iterator(task)
    epochs = [torch.cat([s["target"] for s in epoch.next_epoch_itr()]) for _ in range(2)]
    assert epochs[0].shape == epochs[1].shape and not torch.equal(*epochs)
    assert torch.equal(epochs[0], torch.cat([s["target"] for s in iterator(task).next_epoch_itr()]))
    assert task.carries == []


def test_too_short_a_text_is_refused(corpus):
    with pytest.raises(
        UsageError, match="fewer than one update of 50 lanes or windows of 100 .* lower --batch-size"
    ):
        iterator(build_task(corpus), B=50)
    with pytest.raises(UsageError, match="--update-freq 1,2: .* every epoch needs the same value"):
        iterator(build_task(corpus, update_freq=[1, 2]))


def _sample(task, split="valid", **options):
    return next(iter(iterator(task, split, **options).next_epoch_itr()))


def test_criterion_is_the_definition_and_counts_unknown_symbols(corpus):
    task = build_task(corpus, valid_protocol="carry:1", tokens_per_sample=len(VALID))
    model, criterion = build_model(task).eval(), CharCrossEntropy(task)
    sample = _sample(task)
    loss, size, logged = criterion(model, sample)
    unknown = sum(symbol not in TRAIN for symbol in VALID)
    assert unknown > 0 and logged["unknown"] == unknown and size == len(VALID) - unknown
    direct = direct_bpc(task, model, VALID)
    assert abs(loss.item() / size / math.log(2) - direct) < 1e-5
    with metrics.aggregate() as seen:
        CharCrossEntropy.reduce_metrics([logged, logged])
    values = seen.get_smoothed_values()
    assert values["bpc"] == round(values["bpc"], 4) and abs(values["bpc"] - direct) < 1e-4
    assert values["unknown"] == 2 * unknown and 0 <= values["accuracy"] <= 100
    assert abs(values["ppl"] - 2 ** values["loss"]) < 0.05
    assert CharCrossEntropy.logging_outputs_can_be_summed()


@pytest.mark.parametrize("options", [{"update_freq": [4]}, {"batching": "windows"}])
def test_the_training_split_is_validated_by_the_protocol(corpus, options):
    task = build_task(corpus, valid_protocol="carry", tokens_per_sample=5, **options)
    model, criterion = build_model(task).double().eval(), CharCrossEntropy(task)
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=3).next_epoch_itr()
    results = [task.valid_step(sample, model, criterion) for sample in batches]
    nats, symbols = (sum(float(result[i]) for result in results) for i in (0, 1))
    assert symbols == len(TRAIN)
    assert nats / symbols / math.log(2) == pytest.approx(direct_bpc(task, model, TRAIN), abs=1e-5)


def test_training_carries_the_state_and_starts_each_epoch_from_zeros(corpus):
    """Losses of an epoch of batches equal those of one pass over each lane by itself."""
    task = build_task(corpus, tokens_per_sample=9, update_freq=[2])
    model, criterion = build_model(task).double(), CharCrossEntropy(task)
    epoch = iterator(task, B=2)
    for _ in range(2):
        by_group = {0: 0.0, 1: 0.0}
        for update, sample in enumerate(epoch.next_epoch_itr()):
            loss, _, _ = task.train_step(sample, model, criterion, Optimizer(), update)
            by_group[sample["group"]] += loss.item()
        N = len(TRAIN)
        entries = torch.from_numpy(task.vocabulary.encode(TRAIN))
        inputs = torch.cat([torch.tensor([task.first_input]), entries[:-1]])
        for group in (0, 1):
            expected = 0.0
            for lane in (2 * group, 2 * group + 1):
                part = slice(lane * N // 4, (lane + 1) * N // 4)
                with torch.no_grad():
                    logs = model.eval()(inputs[part].unsqueeze(0))[0][0].float().log_softmax(-1)
                expected -= logs.gather(1, entries[part].unsqueeze(1)).sum().item()
            assert abs(by_group[group] - expected) < 1e-2


def test_a_batch_whose_gradient_is_ignored_moves_nothing(corpus):
    task = build_task(corpus, tokens_per_sample=9)
    model, criterion = build_model(task), CharCrossEntropy(task)
    batches = list(iterator(task, B=2).next_epoch_itr())
    task.train_step(batches[0], model, criterion, Optimizer(), 0)
    before = task.carries[0].after
    task.train_step(batches[0], model, criterion, Optimizer(), 0, ignore_grad=True)
    assert task.carries[0].after is before and task.carries[0].chunk == 0


def test_dropout_depends_on_seed_update_and_group_alone(corpus):
    task = build_task(corpus, tokens_per_sample=9)
    model, criterion = build_model(task, input_dropout=0.5), CharCrossEntropy(task)
    batch = next(iter(iterator(task, B=2).next_epoch_itr()))

    def loss(update, group=0, seed=1):
        task.cfg.seed = seed
        task.carries = [Carry(), Carry()]
        torch.manual_seed(int(torch.randint(1000, ())))
        return task.train_step(batch | {"group": group}, model, criterion, Optimizer(), update)[0].item()

    assert loss(3) == loss(3)
    assert len({loss(3), loss(4), loss(3, group=1), loss(3, seed=2)}) == 4


def test_carry_keeps_the_order():
    carry = Carry().open(0)
    assert carry.read() is None
    carry.write((torch.ones(1),))
    assert carry.open(1).read()[0] == 1
    carry.write((torch.zeros(1),))
    assert carry.open(1).read()[0] == 1, "a repeated batch starts where it did"
    with pytest.raises(RuntimeError, match="chunk 5 came after chunk 1"):
        carry.open(5)
    carry.write((torch.zeros(1),))
    carry.open(2).read()
    assert carry.after == (0,) and carry.open(3).read()[0] == 0, "a batch without a result leaves the state"
    assert carry.open(0).read() is None


@pytest.mark.parametrize("batching", ["lanes", "windows"])
def test_one_iterator_serves_all_epochs(corpus, batching):
    # Giving up an iterator takes up to ten seconds, until its processes have ended.
    options = {"tokens_per_sample": 20, "batching": batching}
    task = build_task(corpus, **options)
    kept = {split: iterator(task, split) for split in ("train", "valid")}
    for epoch in (1, 2, 3):
        for split, first in kept.items():
            training = {"grouped_shuffling": False} if split == "train" else {}
            again = task.get_batch_iterator(task.dataset(split), max_sentences=3, epoch=epoch, **training)
            assert again is first
            fresh = iterator(build_task(corpus, **options), split, epoch=epoch)
            for one, other in zip(again.next_epoch_itr(), fresh.next_epoch_itr(), strict=True):
                assert torch.equal(one["target"], other["target"])
        assert kept["train"].epoch == epoch


def _trained(task, steps):
    model, criterion = build_model(task), CharCrossEntropy(task)
    batches = list(iterator(task, B=2).next_epoch_itr())
    for update, sample in enumerate(batches[:steps]):
        task.train_step(sample, model, criterion, Optimizer(), update)
    task.gather_checkpoint_state()
    return task.get_checkpoint_dict(), len(batches)


def test_checkpoints_hold_the_lanes_in_mid_epoch_only(corpus):
    saved, count = _trained(build_task(corpus, tokens_per_sample=20), steps=4)
    state = saved["CharLMTask"]
    assert state["chunk"] == 3 and len(state["states"]) == 1
    resumed = build_task(corpus, tokens_per_sample=20)
    iterator(resumed, B=2)
    resumed.set_checkpoint_dict(state)
    assert resumed.carries[0].chunk == 3
    for one, other in zip(resumed.carries[0].open(4).read(), state["states"][0], strict=True):
        assert torch.equal(one, other)
    assert _trained(build_task(corpus, tokens_per_sample=20), steps=count)[0] == {
        "CharLMTask": {"reverse": False, "batching": "lanes"}
    }
    assert build_task(corpus).get_checkpoint_dict() == {"CharLMTask": {"reverse": False, "batching": "lanes"}}


def test_resuming_with_other_lanes_is_refused_with_the_reason(corpus):
    state = _trained(build_task(corpus, tokens_per_sample=20), steps=4)[0]["CharLMTask"]
    for options, B, reason in (
        (
            {"tokens_per_sample": 20, "update_freq": [2]},
            2,
            "lanes 2, groups 1, this run has lanes 4, groups 2",
        ),
        ({"tokens_per_sample": 20}, 4, "lanes 2, this run has lanes 4"),
        ({"tokens_per_sample": 10}, 2, "tokens_per_sample 20, this run has tokens_per_sample 10"),
    ):
        task = build_task(corpus, **options)
        iterator(task, B=B)
        with pytest.raises(UsageError, match=reason):
            task.set_checkpoint_dict(state)


def test_checkpoints_of_other_symbols_are_refused(corpus, tmp_path):
    task = build_task(corpus)
    state = build_model(task).state_dict()
    build_model(task, seed=3).load_state_dict(state)
    (tmp_path / "other.txt").write_text(TRAIN.replace("c", "k"))
    other = tmp_path / "other"
    prepare(
        text_files(dict.fromkeys(("train", "valid", "test"), [tmp_path / "other.txt"]), as_bytes=False), other
    )
    with pytest.raises(UsageError, match="trained on other symbols"):
        build_model(build_task(str(other))).load_state_dict(state)


def test_outputs_are_dropped_before_the_output_layer(corpus):
    model = build_model(build_task(corpus), output_dropout=0.5).train()
    logits, extra = model(torch.full((1, 6), 4))
    outputs, dropped = extra["outputs"], extra["dropped_outputs"]
    # No output of this model is zero before it is dropped.
    kept = dropped != 0
    assert 0 < kept.double().mean() < 1
    torch.testing.assert_close(dropped[kept], 2 * outputs[kept], rtol=0, atol=0)
    torch.testing.assert_close(logits, model.output(dropped).transpose(0, 1), rtol=0, atol=0)
