"""Task, model and criterion of the synthetic problems, within one process."""

import dataclasses
import math

import pytest
import torch
from fairseq.logging import metrics
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from omegaconf import OmegaConf

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.cells import CELLS
from rhhn_fairseq.cli.describe import count_parameters, describe
from rhhn_fairseq.criterions.problem_loss import ProblemLoss
from rhhn_fairseq.data.problems.base import Problem
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.classifier import Classifier, ClassifierConfig
from rhhn_fairseq.models.classifier_table import ARCHITECTURES
from rhhn_fairseq.tasks.synthetic import SyntheticTask, SyntheticTaskConfig

TINY_CELL = {"hyper_size": 4, "hyper_embed_size": 2, "rhn_depth": 2}


def _task(problem="copying", **options):
    values = {"problem": problem, "seed": 1, "train_subset": "train", "update_freq": [1], "epoch_updates": 6}
    values |= {"length": 3} if problem in ("copying", "adding", "xor") else {}
    return SyntheticTask.setup_task(SyntheticTaskConfig(**values | {"valid_examples": 10} | options))


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


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_parameter_counts_are_the_tables(arch):
    row = ARCHITECTURES[arch]
    problem = _Sizes(1, 10) if row.problem == "mnist" else _task(row.problem).problem
    config = MODEL_DATACLASS_REGISTRY[arch]()
    assert count_parameters(MODEL_REGISTRY[arch](config, problem)) == row.parameters
    assert config.hidden_size == row.options["hidden_size"] and MODEL_REGISTRY[arch] is not Classifier


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_described(arch):
    text = describe(arch)
    assert f"expected:   {ARCHITECTURES[arch].parameters:,} (equal)" in text
    assert ("figures:" in text) == (ARCHITECTURES[arch].source is not None)


def test_numbers_have_no_vocabulary():
    with pytest.raises(UsageError, match="--arch lstm_mnist reads numbers, it has no --vocab-size"):
        describe("lstm_mnist", 50)


def test_sizes_of_the_papers():
    assert ARCHITECTURES["lstm_copying"].options["hidden_size"] == 128
    assert ARCHITECTURES["lstm_mnist"].options["hidden_size"] == 100
    # One LSTM of 100 units that reads one number (4 x 100 x (1 + 100 + 1)), and ten classes.
    assert ARCHITECTURES["lstm_mnist"].parameters == 40_800 + 1_010


@pytest.mark.parametrize("cell", sorted(CELLS))
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
        ({"hidden_size": 0}, "--hidden-size 0 is too small"),
        ({"cell": "lstmm"}, "unknown cell 'lstmm'"),
        ({"bidirectional_layers": 2}, "bidirectional_layers=2 is more than layers=1"),
        ({"rhn_depth": 2}, "--rhn-depth is not an option of the cell lstm"),
        ({"h_detach": 1.5}, "h_detach=1.5 is too large"),
        ({"output_dropout": 1.0}, "--output-dropout 1.0 is too large"),
        ({"cell": "rhn", "c_detach": 0.5}, "--c-detach is not an option of the cell rhn"),
    ],
)
def test_impossible_models_are_refused(options, reason):
    with pytest.raises(UsageError, match=reason):
        Classifier(ClassifierConfig(**{"hidden_size": 8} | options), _Sizes())


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"problem": "copy"}, "--problem copy is unknown"),
        ({"problem": "digits", "length": 9}, "--length 9 is not an option of --problem digits"),
        ({"train_examples": -1}, "--train-examples -1 is too small, the smallest is 0"),
        ({"valid_examples": 0}, "--valid-examples 0 is too small"),
        ({"epoch_updates": 0}, "--epoch-updates 0 is too small"),
        ({"seed": -1}, "--seed -1 is too small"),
        ({"h_detach_final": 0.1}, "--h-detach-final needs --detach-anneal-updates N"),
        ({"h_detach_final": 1.5, "detach_anneal_updates": 5}, r"--h-detach-final 1.5 is not in \[0, 1\]"),
        (
            {"c_detach_final": math.nan, "detach_anneal_updates": 5},
            r"--c-detach-final nan is not in \[0, 1\]",
        ),
        ({"detach_anneal_updates": 5}, "needs --h-detach-final P or --c-detach-final P"),
        ({"h_detach_final": 0.1, "detach_anneal_updates": 0}, "--detach-anneal-updates 0 is too small"),
        ({"detach_until": 0}, "--detach-until 0 is too small"),
    ],
)
def test_impossible_tasks_are_refused(options, reason):
    with pytest.raises(UsageError, match=reason):
        _task(**options)


def test_unknown_splits_and_other_tasks_are_refused():
    with pytest.raises(UsageError, match="no split 'valid2' of a problem, choose from train, valid, test"):
        _task().load_dataset("valid2")
    with pytest.raises(UsageError, match="--arch classifier answers the problems of --task synthetic"):
        Classifier.build_model(_named(_config()), object())


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


def test_max_tokens_are_whole_sequences():
    task = _task()
    task.load_dataset("valid")
    iterator = task.get_batch_iterator(task.dataset("valid"), max_tokens=100)
    sample = next(iter(iterator.next_epoch_itr()))
    assert sample["target"].shape == (4, 23) and sample["ntokens"] == 92 and sample["nsentences"] == 4


def _logged(outputs):
    with metrics.aggregate() as seen:
        ProblemLoss.reduce_metrics(outputs)
    return seen.get_smoothed_values()


def test_copying_counts_the_recalled_symbols_and_loses_at_every_step():
    task = _task()
    criterion = ProblemLoss(task)
    (sample,) = _batches(task, "valid", B=10)
    target = sample["target"]
    # A network that knows the blanks and answers the ten symbols with 1.
    scores = torch.nn.functional.one_hot(target.where(target == 0, 1), 9).float() * 3

    def model(inputs):
        return scores

    loss, size, logged = criterion(model, sample)
    assert size == 10 * 23
    direct = -scores.log_softmax(-1).gather(-1, target.unsqueeze(-1)).sum().item()
    assert abs(loss.item() - direct) < 1e-3
    recalled = target[:, -10:]
    found = _logged([logged, logged])
    assert found["accuracy"] == round(100 * (recalled == 1).float().mean().item(), 2) < 30
    assert abs(found["loss"] - direct / size) < 1e-5 and "mse" not in found
    scores = torch.nn.functional.one_hot(target, 9).float()
    assert _logged([criterion(model, sample)[2]])["accuracy"] == 100


def test_adding_has_a_squared_error():
    task = _task("adding")
    criterion = ProblemLoss(task)
    (sample,) = _batches(task, "valid", B=10)
    errors = torch.tensor([0.0, 0.03, -0.039, 0.041, -0.5, 0, 0, 0, 0, 0])

    def model(inputs):
        return (sample["target"] + errors).unsqueeze(-1)

    loss, size, logged = criterion(model, sample)
    assert size == 10 and abs(loss.item() - errors.square().sum().item()) < 1e-6
    found = _logged([logged])
    assert found["mse"] == found["loss"] == round(errors.square().mean().item(), 5)
    assert found["accuracy"] == 80
    assert ProblemLoss.logging_outputs_can_be_summed()
    assert criterion(model, sample, reduce=False)[0].shape == (10,)


class _Optimizer:
    def backward(self, loss):
        loss.backward()


def _losses(task, model, updates, B=4, start=0):
    """Losses of some updates of plain gradient descent."""
    criterion, found = ProblemLoss(task), []
    batches = _batches(task, B=B)
    with metrics.aggregate():
        for update in range(start, start + updates):
            model.zero_grad()
            loss, size, _ = task.train_step(batches[update], model, criterion, _Optimizer(), update)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 / size * parameter.grad
            found.append(loss.item())
    return found


def test_random_numbers_depend_on_seed_update_and_batch_alone():
    task = _task()
    model, criterion = _model(task, input_dropout=0.5, h_detach=0.5), ProblemLoss(task)
    batch = _batches(task)[0]

    def loss(update, number=0, seed=1):
        task.cfg.seed = seed
        torch.manual_seed(int(torch.randint(1000, ())))
        return task.train_step(batch | {"number": number}, model, criterion, _Optimizer(), update)[0].item()

    assert loss(3) == loss(3)
    assert len({loss(3), loss(4), loss(3, number=1), loss(3, seed=2)}) == 4


def test_a_run_that_goes_on_is_the_run_that_never_stopped():
    options = {"h_detach_final": 0.0, "detach_anneal_updates": 5}
    task = _task(**options)
    model = _model(task, h_detach=1.0, c_detach=0.5, input_dropout=0.3)
    whole = _losses(task, model, updates=6)
    first = _task(**options)
    begun = _model(first, h_detach=1.0, c_detach=0.5, input_dropout=0.3)
    parts = _losses(first, begun, updates=2)
    second = _task(**options)
    resumed = _model(second, seed=9, h_detach=1.0, c_detach=0.5, input_dropout=0.3)
    resumed.load_state_dict(begun.state_dict())
    parts += _losses(second, resumed, updates=4, start=2)
    assert parts == whole
    for key, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


def test_checkpoints_of_other_models_are_refused():
    state = _model(_task()).state_dict()
    _model(_task(), seed=3).load_state_dict(state)
    with pytest.raises(UsageError, match=r"c_gain is missing there .*in this model for copying"):
        _model(_task(), cell="ln_lstm").load_state_dict(state)
    with pytest.raises(UsageError, match="another cell, size or problem: bias_out is .9,. there and .1,."):
        _model(_task("adding")).load_state_dict(state)
    other_delay = _task(length=9)
    _model(other_delay).load_state_dict(state)


def test_diagnostics_are_metrics_of_the_validation():
    task = _task()
    model = _model(task, cell="hyperlstm")
    stats = {"loss": 1.0}
    task.post_validate(model, stats, None)
    assert stats == {"loss": 1.0} | {key: round(value, 4) for key, value in model.diagnostics().items()}
    assert stats["layer1_scaling_rank"] > 1


def test_configurations_are_dataclasses_with_the_cells_options():
    names = {spec.name for spec in dataclasses.fields(ClassifierConfig)}
    assert {"h_detach", "c_detach", "rhn_depth", "hyper_size", "bidirectional_layers"} <= names
    assert MODEL_DATACLASS_REGISTRY["rhn_mnist"]().rhn_depth == 2
