"""Every option of a cell reaches a translation model: with another value, its gradients differ."""

import dataclasses

import pytest
import torch
from models.test_gnmt import _batch, _Task

from rhhn_fairseq.cells import CELLS
from rhhn_fairseq.cells.registry import cell_options
from rhhn_fairseq.models.gnmt import GNMT, GNMTConfig
from rhhn_fairseq.models.options import CELL_OPTIONS

# Options whose other values need others beside them, or that change nothing but time and memory.
APART = {"recompute_steps", "main_cell", "hyper_cell", "hyper_output"}
OF_ANOTHER_MAIN_CELL = {"first_step", "transform_bias", "rhn_depth"}


def _other(spec: dataclasses.Field, default):
    """Returns a valid value of an option that is not its default."""
    if choices := spec.metadata["choices"]:
        return next(choice for choice in choices if choice != default)
    if isinstance(default, float):
        return default + 0.3 if default < 0.5 else default - 0.3
    return default + 1


def _gradients(cell: str, options: dict) -> dict[str, torch.Tensor]:
    """Returns the output and all gradients of a small model in training, from the same random numbers."""
    torch.manual_seed(0)
    sizes = dict(encoder_layers=1, decoder_layers=1, hidden_size=8, embed_dim=6, residual_from=0)
    model = GNMT.build_model(GNMTConfig(cell=cell, **sizes | options), _Task()).train()
    dictionary = model.decoder.dictionary
    source, target = _batch(dictionary), _batch(dictionary, left=False)
    torch.manual_seed(1)
    y = model(source, (source != dictionary.pad()).sum(1), target)[0]
    y.square().sum().backward()
    return {"output": y.detach()} | {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def _same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("cell", CELLS)
def test_every_option_of_a_cell_reaches_the_model(cell):
    defaults = cell_options(cell)
    small = {"hyper_size": 4, "rhn_depth": 2, "recurrent_dropout": 0.2}
    base = {name: value for name, value in small.items() if name in defaults}
    usual = _gradients(cell, base)
    assert _same(usual, _gradients(cell, base))
    unused = APART | (OF_ANOTHER_MAIN_CELL if cell == "hyper" else set())
    for spec in dataclasses.fields(CELLS[cell].config):
        if spec.name in CELL_OPTIONS and spec.name not in unused:
            value = _other(spec, base.get(spec.name, defaults[spec.name]))
            changed = _gradients(cell, base | {spec.name: value})
            assert not _same(usual, changed), f"{spec.name}={value} changes nothing"
