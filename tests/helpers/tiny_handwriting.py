"""Small handwriting data and models for the tests."""

import dataclasses

import torch

from helpers.strokes_cli import run
from rhhn_fairseq import plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.models.handwriting import Handwriting, HandwritingConfig

NORMALISATION = Normalisation((2.5, -0.5), (10.0, 12.0))
SYMBOLS = " abcdeh"


def prepare_words(dest, lines=24, **options):
    """Short words in a Hershey font, prepared in ``dest``."""
    given = [tensor for name, value in options.items() for tensor in (f"--{name.replace('_', '-')}", value)]
    sizes = ["--lines", lines, "--max-words", 1, "--step", 0.3]
    sizes += ["--letters", 0, "--jitter", 0.008, "--fonts", "futural,cursive,scripts"]
    assert run("hershey", *sizes, *given, "--dest", dest) == 0
    return dest


def build(cell="lstm", window=0, seed=0, **options) -> Handwriting:
    """An untrained model of 8 units, in evaluation."""
    torch.manual_seed(seed)
    small = {"hyper_size": 4, "hyper_embed_size": 2} if "hyper" in cell and cell != "hyperrhn" else {}
    small = {"hyper_size": 4} if cell == "hyperrhn" else small
    config = HandwritingConfig(cell=cell, hidden_size=8, mixtures=2, window=window, **(small | options))
    return Handwriting(config, NORMALISATION, SYMBOLS, 6.0).eval()


def save(model: Handwriting, config: HandwritingConfig, path, data=None) -> None:
    """A checkpoint as fairseq writes it, as far as loading asks for it."""
    cfg = {"model": dataclasses.asdict(config) | {"_name": "handwriting"}}
    cfg["task"] = {"_name": "handwriting", "data": str(data)}
    history = [{"optimizer_name": "Adam", "lr_scheduler_state": {}, "num_updates": 1}]
    state = {"cfg": cfg, "args": None, "model": model.state_dict(), "optimizer_history": history}
    state |= {"task_state": {}, "extra_state": {"train_iterator": {"epoch": 1}}, "last_optimizer_state": {}}
    torch.save(state, path)


def disturb(model, size=0.3):
    """Weights of hypernetworks start where nothing changes; these do not."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn_like(parameter)
    return model
