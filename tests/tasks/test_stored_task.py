"""Evaluation takes the task and its options from the checkpoint; numbers and averages in checkpoints."""

import collections
import math
import re
import shutil

import numpy as np
import pytest
import torch
from fairseq import options
from fairseq.checkpoint_utils import (
    load_checkpoint_to_cpu,
    load_model_ensemble_and_task,
    save_ema_as_checkpoint,
)
from fairseq.optim.adam import FairseqAdam
from helpers.option_walk import Workplace, training
from helpers.programs import run
from torch.utils._pytree import tree_map

from rhhn_fairseq.compat.checkpoints import WeightsOnlyTorch, plain
from rhhn_fairseq.compat.command_line import check_ensemble
from rhhn_fairseq.errors import UsageError

# Hydra deprecates what fairseq's own configuration and start-up rest on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


HERE = ["--cpu", "--num-workers", 0]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Workplace(tmp_path_factory.mktemp("place"))


def works(program, *arguments, stdin=""):
    outcome = run(program, arguments, stdin=stdin)
    assert outcome.kind == "works", outcome.text
    return outcome.text


def parse(parser, *arguments):
    return options.parse_args_and_arch(parser(), [str(argument) for argument in arguments])


def test_programs_need_no_task(place, caplog):
    path, other = place.checkpoint_of("char_lm"), place.folder / "other.pt"
    state = torch.load(path, weights_only=True)
    state["model"]["weight_out"] *= -3.0
    torch.save(state, other)
    line = [*place.data_of("char_lm"), *HERE, "--path"]
    with caplog.at_level("INFO"):
        for models in (path, other, f"{path}:{other}"):
            works("eval_lm", *line, models)
    first, second, ensemble = map(float, re.findall(r"([\d.]+) bits per character", caplog.text))
    # The mean of probabilities is better than the mean of their logarithms.
    assert first != ensemble < (first + second) / 2
    works("validate", *line, path)
    works("validate", "--path", place.checkpoint_of("synthetic"), *HERE)


def test_options_are_the_checkpoints_and_given_ones_take_precedence(place):
    path = place.folder / "options.pt"
    state = torch.load(place.checkpoint_of("char_lm"), weights_only=True)
    state["cfg"]["task"] |= {"protocol": "carry:4", "tokens_per_sample": 9, "seed": 77}
    torch.save(state, path)
    line = [options.get_eval_lm_parser, "data", "--path", path]
    args = parse(*line)
    assert (args.task, args.protocol, args.tokens_per_sample) == ("char_lm", "carry:4", 9)
    assert (args.seed, args.data, args.batch_size) == (1, "data", None)
    assert parse(*line, "--protocol=carry").protocol == "carry"
    # With --task, fairseq's own defaults stand.
    assert parse(*line, "--task", "char_lm").protocol == "carry"
    # Of an ensemble, the first.
    ensemble = f"{path}:{place.checkpoint_of('char_lm')}"
    assert parse(options.get_eval_lm_parser, "data", "--path", ensemble).protocol == "carry:4"


def test_an_ensemble_does_one_thing(place, tmp_path):
    state = torch.load(place.checkpoint_of("gnmt_translation"), weights_only=True)
    task = state["cfg"]["task"]

    def save(name, **changes):
        torch.save(state | {"cfg": state["cfg"] | {"task": task | changes}}, tmp_path / name)
        return tmp_path / name

    there = save("there.pt", source_lang="en", target_lang="fr")
    back = save("back.pt", source_lang="fr", target_lang="en")
    said = f"{there} is for translation from en to fr, {back} for translation from fr to en; all must agree"
    for named in ([], ["--task", "translation"]):
        with pytest.raises(UsageError, match=said):
            parse(options.get_generation_parser, "data", "--path", f"{there}:{back}", *named)
    with pytest.raises(UsageError, match="for char_lm"):
        check_ensemble([str(there), str(place.checkpoint_of("char_lm"))])
    # fairseq's own task of the same languages may take part.
    other = save("other.pt", source_lang="en", target_lang="fr", _name="translation")
    check_ensemble([str(there), str(other)])


def test_validation_has_the_batch_size_of_the_training(place):
    path = place.checkpoint_of("synthetic")
    assert parse(options.get_validation_parser, "--path", path).batch_size == 4
    args = parse(options.get_validation_parser, "--path", path, "--max-tokens", 50)
    assert (args.batch_size, args.max_tokens) == (None, 50)


@pytest.mark.parametrize("criterion", ["label_smoothed_cross_entropy", "chunked_cross_entropy"])
def test_a_prefix_is_left_out_of_losses_and_of_their_count(criterion, place, tmp_path):
    line = [*training("gnmt_translation", place), "--criterion", criterion, "--save-dir", tmp_path]
    works("train", *line)
    path = tmp_path / "checkpoint_last.pt"
    [model], cfg, task = load_model_ensemble_and_task([str(path)])
    task.load_dataset("valid")
    data = task.dataset("valid")
    sample = data.collater([data[i] for i in range(len(data))])
    model.eval()
    with torch.no_grad():
        log_p = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
    target = sample["target"]
    scored = target[:, 3:] != task.target_dictionary.pad()
    nll = -log_p.gather(2, target.unsqueeze(2)).squeeze(2)[:, 3:][scored].mean().item() / math.log(2)
    # The option is the checkpoint's criterion's, which need not be named.
    line = [*place.data_of("gnmt_translation"), "--path", path, *HERE, "--log-format", "json"]
    [figure] = re.findall(r'"valid_nll_loss": "(.*?)"', works("validate", *line, "--ignore-prefix-size", 3))
    assert float(figure) == pytest.approx(nll, abs=5e-4 + 1e-6)
    # What a training divides its gradients by.
    cfg.criterion.ignore_prefix_size = 3
    loss = task.build_criterion(cfg.criterion)
    optimizer = FairseqAdam(cfg.optimizer, list(model.parameters()))
    _, size, _ = task.train_step(sample, model, loss, optimizer, 0)
    assert size == scored.sum()


@pytest.mark.parametrize("task", ["char_lm", pytest.param("synthetic", marks=pytest.mark.slow)])
def test_averages_train_resume_and_evaluate(task, place, tmp_path):
    line = [*training(task, place), "--store-ema", "--ema-decay", 0.5, "--save-dir", tmp_path]
    works("train", *line)
    works("train", *line, "--max-update", 4)
    last, averaged = tmp_path / "checkpoint_last.pt", str(tmp_path / "averaged.pt")
    save_ema_as_checkpoint(str(last), averaged)
    model, ema = (load_checkpoint_to_cpu(str(path))["model"] for path in (last, averaged))
    differ = [key for key in model if not torch.equal(model[key], ema[key])]
    assert differ and all(model[key].is_floating_point() for key in differ)
    works("validate", *place.data_of(task), "--path", averaged, *HERE)


def test_numbers_are_pythons():
    state = {"a": np.float64(0.5), "b": [np.int64(3), (np.bool_(True),)], "c": np.array([1, 2])}
    found = tree_map(plain, state)
    assert type(found["a"]) is float and [type(item) for item in found["b"]] == [int, tuple]
    assert found["b"][1][0] is True and torch.equal(found["c"], torch.tensor([1, 2]))
    ordered = tree_map(plain, collections.OrderedDict(z=np.float32(2.0), y=torch.zeros(1)))
    assert isinstance(ordered, collections.OrderedDict) and list(ordered) == ["z", "y"]
    weight = torch.zeros(2)
    assert plain(weight) is weight and plain("two") == "two"


def test_a_checkpoint_is_opened_once(place, monkeypatch, tmp_path):
    """fairseq-validate reads its command line several times."""
    path = tmp_path / "copy.pt"
    shutil.copy(place.checkpoint_of("synthetic"), path)
    loads, load = [], WeightsOnlyTorch.load
    monkeypatch.setattr(WeightsOnlyTorch, "load", lambda *a, **k: loads.append(a) or load(*a, **k))
    for _ in range(3):
        parse(options.get_validation_parser, "--path", path)
    assert len(loads) == 1
