"""h-detach and c-detach in stacks and translation models, and probabilities that change in training."""

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from fairseq.logging import metrics
from helpers.in_process import Optimizer
from omegaconf import OmegaConf

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.cells import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.detach import DetachAnnealing, DetachSchedule
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.models.gnmt import GNMTConfig
from rhhn_fairseq.tasks.gnmt_translation import GNMTTranslationConfig, GNMTTranslationTask


def _stack(cell="lstm", **options):
    return Stack(StackConfig(cell=cell, input_size=2, hidden_size=5, **options)).train()


def test_a_schedule_is_a_line_and_then_the_final_value():
    schedule = DetachSchedule(h_detach_final=0.1, detach_anneal_updates=4)
    found = [schedule.probability("h_detach", 0.5, update) for update in (0, 1, 2, 4, 5, 1000)]
    np.testing.assert_allclose(found, [0.5, 0.4, 0.3, 0.1, 0.1, 0.1], rtol=0, atol=1e-12)
    assert found[-1] == 0.1
    assert schedule.probability("c_detach", 0.3, 1000) == 0.3
    stop = DetachSchedule(detach_until=3)
    assert [stop.probability("h_detach", 0.5, update) for update in (0, 2, 3, 9)] == [0.5, 0.5, 0, 0]
    assert not DetachSchedule() and schedule and stop


def _probabilities(model):
    cells = (module for module in model.modules() if isinstance(module, Cell))
    return {(cell.config.h_detach, cell.config.c_detach) for cell in cells}


def test_annealing_reaches_the_cells_of_a_stack_but_not_their_inner_networks():
    own = {"h_detach": 0.5, "c_detach": 0.2, "hyper_size": 3}
    model = _stack("hyperlstm", layers=2, bidirectional_layers=2, cell_options=own)
    schedule = DetachSchedule(h_detach_final=1.0, c_detach_final=0.0, detach_anneal_updates=10)
    annealing, inner = DetachAnnealing(model, schedule), (0.0, 0.0)
    # Nothing is kept between updates.
    for update, h, c in ((0, 0.5, 0.2), (5, 0.75, 0.1), (10, 1.0, 0.0), (0, 0.5, 0.2)):
        annealing.set_update(update)
        assert _probabilities(model) == {(h, c), inner}
        assert annealing.probabilities(update) == {"h_detach": h, "c_detach": c}
        noise = model.cells[0].sample_noise(50, 2)
        assert noise["h_detach"].all() == (h == 1) and ("c_detach" in noise) == (c > 0)


@pytest.mark.parametrize(
    "schedule, reason",
    [
        (dict(h_detach_final=0.1, detach_anneal_updates=5), "--h-detach-final 0.1 needs --h-detach P"),
        (dict(detach_until=5), "--detach-until 5 needs --h-detach P or --c-detach P"),
    ],
)
def test_a_schedule_needs_a_probability_to_start_from(schedule, reason):
    with pytest.raises(UsageError, match=reason):
        DetachAnnealing(_stack(), DetachSchedule(**schedule))


def _dictionary():
    dictionary = Dictionary()
    for n in range(9):
        dictionary.add_symbol(f"w{n}")
    return dictionary


def _gnmt_task(tmp_path, **options):
    cfg = GNMTTranslationConfig(data=str(tmp_path), source_lang="en", target_lang="fr", seed=1, **options)
    return GNMTTranslationTask(cfg, _dictionary(), _dictionary())


def _gnmt(task, cell, form, from_checkpoint=False, **options):
    torch.manual_seed(0)
    more = {"hyper_size": 4, "hyper_embed_size": 2} if cell == "hyperlstm" else {}
    sizes = {"hidden_size": 6, "embed_dim": 5, "encoder_layers": 2, "decoder_layers": 3, "dropout": 0.0}
    own = {"init_range": 0.0, "init_cells": "own", "residual_from": 0}
    config = GNMTConfig(_name="gnmt", cell=cell, attention=form, **own | sizes | more | options)
    # As fairseq hands it over, a part of a larger configuration.
    return task.build_model(OmegaConf.create({"model": config}).model, from_checkpoint)


@pytest.mark.parametrize("cell, form", [("lstm", "paper"), ("hyperlstm", "v2")])
def test_translation_models_are_detached_and_annealed(tmp_path, cell, form):
    task = _gnmt_task(tmp_path, h_detach_final=0.0, detach_anneal_updates=4)
    model = _gnmt(task, cell, form, h_detach=0.8)
    plain = _gnmt(_gnmt_task(tmp_path), cell, form)
    words = torch.randint(4, 13, (3, 6))
    sample = {"src_tokens": words, "src_lengths": torch.full((3,), 6), "prev_output_tokens": words}

    def gradient(of):
        of.zero_grad()
        torch.manual_seed(2)
        logits, _ = of.train()(**sample)
        logits.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in of.parameters() if p.grad is not None])

    whole = gradient(plain)
    assert not torch.allclose(gradient(model), whole, rtol=1e-2)
    for update, probability in ((0, 0.8), (2, 0.4)):
        task.annealing.set_update(update)
        assert {p for p in _probabilities(model) if p[0]} == {(probability, 0.0)}
    task.annealing.set_update(4)
    torch.testing.assert_close(gradient(model), whole, rtol=0, atol=0)


def test_a_translation_task_anneals_in_training(tmp_path):
    task = _gnmt_task(tmp_path, h_detach_final=0.0, detach_anneal_updates=4)
    model = _gnmt(task, "lstm", "v2", h_detach=0.8)
    words = torch.randint(4, 13, (3, 6))
    net_input = {"src_tokens": words, "src_lengths": torch.full((3,), 6), "prev_output_tokens": words}
    sample = {"ntokens": 18, "nsentences": 3, "net_input": net_input}

    def criterion(model, sample):
        return model(**sample["net_input"])[0].square().sum(), 18, {}

    with metrics.aggregate() as seen:
        task.train_step(sample, model, criterion, Optimizer(), 2)
    assert seen.get_smoothed_values() == {"h_detach": 0.4}
    assert model.encoder.stack.cells[0].config.h_detach == 0.4
    with pytest.raises(UsageError, match="--h-detach-final 0.0 needs --h-detach P"):
        _gnmt(task, "lstm", "v2")
    # The task of an ensemble is that of its first model, which may have a schedule that another lacks.
    _gnmt(task, "lstm", "v2", from_checkpoint=True)
    assert task.annealing is None


def test_seed_update_and_batch_decide_the_dropout_of_translations(tmp_path):
    words = torch.randint(4, 13, (3, 6), generator=torch.Generator().manual_seed(0))
    net_input = {"src_tokens": words, "src_lengths": torch.full((3,), 6), "prev_output_tokens": words}
    sample = {"ntokens": 18, "nsentences": 3, "net_input": net_input}

    def criterion(model, sample):
        return model(**sample["net_input"])[0].square().sum(), 18, {}

    def loss(seed, update=1, key=0):
        task = _gnmt_task(tmp_path)
        task.cfg.seed = seed
        model = _gnmt(task, "lstm", "v2", dropout=0.5)
        return task.train_step(sample | {"key": key}, model, criterion, Optimizer(), update)[0].item()

    assert loss(1) == loss(1)
    assert len({loss(1), loss(2), loss(1, update=2), loss(1, key=5)}) == 4
