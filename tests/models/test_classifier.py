"""Task, model and criterion of the synthetic problems, within one process."""

import dataclasses

import pytest
import torch
from helpers.in_process import Optimizer
from omegaconf import OmegaConf

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.cells import CELLS
from rhhn_fairseq.criterions.problem_loss import ProblemLoss
from rhhn_fairseq.data.problems.generated import Problem
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.classifier import Classifier, ClassifierConfig
from rhhn_fairseq.tasks.synthetic import SyntheticTask, SyntheticTaskConfig

TINY_CELL = {"hyper_size": 4, "hyper_embed_size": 2, "rhn_depth": 2}


def _task(problem="copying", **options):
    values = {"problem": problem, "seed": 1, "train_subset": "train", "update_freq": [1]}
    if problem in ("copying", "adding", "xor"):
        values |= {"length": 3, "epoch_updates": 6, "valid_examples": 10}
    return SyntheticTask.setup_task(SyntheticTaskConfig(**values | options))


def _config(cell="lstm", **options):
    known = CELLS[cell].config.__dataclass_fields__
    tiny = {key: value for key, value in TINY_CELL.items() if key in known}
    return ClassifierConfig(cell=cell, **{"hidden_size": 8} | tiny | options)


def _model(task, cell="lstm", seed=0, **options):
    torch.manual_seed(seed)
    return task.build_model(_named(_config(cell, **options)))


def _named(config, name="classifier"):
    """The configuration as fairseq hands it over, a part of a larger one."""
    return OmegaConf.create({"model": dataclasses.replace(config, _name=name)}).model


class _Sizes(Problem):
    """Stands for a problem of which only the sizes matter."""

    def __init__(self, input_size=2, classes=3, per_step=False, steps=4):
        self.name, self.input_size, self.classes = "sizes", input_size, classes
        self.per_step, self.steps = per_step, steps


@pytest.mark.parametrize("cell", ["lstm", "hyperrhn", "ln_hyperlstm"])
@pytest.mark.parametrize("per_step", [False, True])
def test_answers_of_every_cell(cell, per_step):
    torch.manual_seed(0)
    model = Classifier(_config(cell), _Sizes(per_step=per_step))
    inputs = torch.randn(5, 4, 2)
    answers = model(inputs)
    assert answers.shape == ((5, 4, 3) if per_step else (5, 3))
    answers.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    alone = model.eval()(inputs[2:3])
    torch.testing.assert_close(alone[0], model(inputs)[2], rtol=0, atol=1e-6)
    # As fairseq-validate casts them, without the batches.
    assert model.bfloat16()(inputs).isfinite().all()


def test_an_answer_at_a_step_sees_what_came_before_and_the_last_sees_everything():
    model = Classifier(_config(), _Sizes(per_step=True)).eval()
    inputs = torch.randn(1, 4, 2)
    changed = inputs.clone()
    changed[:, 2] += 1
    before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :2], after[:, :2]) and not torch.equal(before[:, 2:], after[:, 2:])
    last = Classifier(_config(), _Sizes()).eval()
    last.load_state_dict(model.state_dict())
    torch.testing.assert_close(last(inputs), before[:, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("layers, both", [(1, 1), (2, 2), (2, 1)])
def test_both_directions_of_the_last_layer_have_read_everything(layers, both):
    model = Classifier(_config(layers=layers, bidirectional_layers=both), _Sizes()).eval()
    inputs = torch.randn(1, 4, 2, requires_grad=True)
    hidden = {}
    model.stack.register_forward_hook(lambda module, args, output: hidden.update(y=output[0]))
    model(inputs)
    summary = model._last(hidden["y"])
    assert summary.shape == (1, 16 if layers == both else 8)
    for unit in (0, -1):
        (gradient,) = torch.autograd.grad(summary[0, unit], inputs, retain_graph=True)
        assert (gradient[0] != 0).any(dim=-1).all(), "every step reaches the answer"


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"problem": "copy"}, "--problem copy is unknown"),
        ({"problem": "digits", "length": 9}, "--length 9 is not an option of --problem digits"),
        ({"problem": "digits", "train_examples": 9}, "--train-examples 9 is for generated problems, not"),
        ({"h_detach_final": 0.1}, "--h-detach-final needs --detach-anneal-updates N"),
    ],
)
def test_impossible_tasks_are_refused(options, reason):
    with pytest.raises(UsageError, match=reason):
        _task(**options)


def _batches(task, split="train", B=4, workers=1, rank=0, epoch=1):
    task.load_dataset(split)
    training = {"grouped_shuffling": False} if split == "train" else {}
    iterator = task.get_batch_iterator(
        task.dataset(split), max_sentences=B, num_shards=workers, shard_id=rank, epoch=epoch, **training
    )
    return list(iterator.next_epoch_itr(shuffle=True))


@pytest.mark.parametrize("options", [{}, {"train_examples": 24}, {"problem": "digits"}])
def test_workers_see_what_one_worker_sees_with_that_update_frequency(options):
    one = _batches(_task(**options, update_freq=[2]))
    two = [_batches(_task(**options), workers=2, rank=rank) for rank in range(2)]
    interleaved = [sample for pair in zip(*two, strict=True) for sample in pair if sample]
    assert len(one) == len(interleaved) >= 6
    for ours, theirs in zip(one, interleaved, strict=True):
        assert torch.equal(ours["net_input"]["inputs"], theirs["net_input"]["inputs"])
        assert torch.equal(ours["target"], theirs["target"]) and ours["number"] == theirs["number"]


def test_epochs_of_fresh_examples_have_the_updates_asked_for():
    assert len(_batches(_task())) == 6
    assert len(_batches(_task(update_freq=[3]))) == 18
    assert len(_batches(_task(), workers=2)) == 6
    with pytest.raises(UsageError, match="--update-freq 1,2: .*every epoch needs the same value"):
        _batches(_task(update_freq=[1, 2]))
    first, second = (_batches(_task(), epoch=epoch)[0]["target"] for epoch in (1, 2))
    assert not torch.equal(first, second)


def test_validation_is_the_same_in_every_run():
    found = [torch.cat([s["target"] for s in _batches(_task(seed=seed), "valid")]) for seed in (1, 2)]
    assert torch.equal(*found) and len(found[0]) == 10


def test_random_numbers_depend_on_seed_update_and_batch_alone():
    task = _task()
    model, criterion = _model(task, input_dropout=0.5, h_detach=0.5), ProblemLoss(task)
    batch = _batches(task)[0]

    def loss(update, number=0, seed=1):
        task.cfg.seed = seed
        torch.manual_seed(int(torch.randint(1000, ())))
        return task.train_step(batch | {"number": number}, model, criterion, Optimizer(), update)[0].item()

    assert loss(3) == loss(3)
    assert len({loss(3), loss(4), loss(3, number=1), loss(3, seed=2)}) == 4


def test_diagnostics_are_metrics_of_the_validation():
    task = _task()
    model = _model(task, cell="hyperlstm")
    stats = {"loss": 1.0}
    task.post_validate(model, stats, None)
    assert stats == {"loss": 1.0} | {key: round(value, 4) for key, value in model.diagnostics().items()}
    assert stats["layer1_scaling_rank"] > 1
