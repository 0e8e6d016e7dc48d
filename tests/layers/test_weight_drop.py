"""Weight drop: which weights it drops, and that a pass sees them dropped."""

import dataclasses

import pytest
import torch
from helpers.small_cells import build
from torch.nn.utils import prune

from rhhn_fairseq.cells import CELLS, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import Stack, StackConfig, recurrent_weights, with_dropped_weights
from rhhn_fairseq.layers.window import WindowConfig

T, B = 5, 3


def _small(name):
    return build(name, {"hyper_size": 4} if "hyper_size" in cell_options(name) else {}).train()


def _state(cell):
    return tuple(torch.randn(B, size, dtype=torch.float64) for size in cell.state_sizes)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("name", sorted(CELLS))
def test_a_dropped_weight_has_no_gradient(name, backend):
    cell = _small(name)
    cell.backend = backend
    recurrent = recurrent_weights(cell)
    # The minimal cells have no recurrent matrix.
    assert bool(recurrent) != name.startswith("min")
    x = torch.randn(T, B, 3, dtype=torch.float64)
    state = _state(cell)
    y, _ = with_dropped_weights(cell, 0.5)(x, state)
    y.sum().backward()
    for key, weight in cell.named_parameters():
        zeros = (weight.grad == 0).double().mean()
        if key in recurrent:
            assert 0.2 < zeros < 0.8, key
            assert weight.grad.isfinite().all()


def test_rounds_that_read_the_input_are_not_dropped():
    cell = build("mogrifier_lstm", dict(rounds=4, rank=2))
    assert list(recurrent_weights(cell)) == ["weight_h", "weight_rounds.0", "weight_rounds.2"]


@pytest.mark.parametrize("name", ["lstm", "hyperrhn"])
def test_segments_see_the_dropped_weights(name):
    cell, x = _small(name), torch.randn(T, B, 3, dtype=torch.float64)
    state, gradients = _state(cell), []
    for steps in (0, 2):
        cell.config = dataclasses.replace(cell.config, recompute_steps=steps)
        torch.manual_seed(3)
        y, _ = with_dropped_weights(cell, 0.5)(x, state)
        gradients.append(torch.autograd.grad(y.square().sum(), list(cell.parameters())))
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["lstm", "ln_hyperlstm", "hyper"])
def test_a_pass_is_that_of_a_cell_with_these_weights(name):
    cell, state, x = _small(name), None, torch.randn(T, B, 3, dtype=torch.float64)
    torch.manual_seed(7)
    y, after = with_dropped_weights(cell, 0.3)(x, state)
    torch.manual_seed(7)
    with torch.no_grad():
        for weight in recurrent_weights(cell).values():
            keep = torch.nn.functional.dropout(torch.ones_like(weight), 0.3)
            assert set(keep.unique().tolist()) == {0.0, 1 / 0.7}
            weight *= keep
    expected, expected_after = cell(x, state)
    torch.testing.assert_close((y, after), (expected, expected_after), rtol=0, atol=0)


def test_a_stack_drops_in_training_alone_and_anew_in_every_pass():
    torch.manual_seed(0)
    config = StackConfig(
        cell="lstm", input_size=3, hidden_size=4, layers=2, bidirectional_layers=1, weight_drop=0.5
    )
    stack, x = Stack(config).double(), torch.randn(T, B, 3, dtype=torch.float64)
    first, second = stack(x)[0], stack(x)[0]
    assert not torch.equal(first, second)
    stack.eval()
    assert torch.equal(stack(x)[0], stack(x)[0])
    for weight in (stack.cells[0].weight_h, stack.backward_cells[0].weight_h, stack.cells[1].weight_h):
        stack.train()
        stack.zero_grad()
        stack(x)[0].sum().backward()
        assert (weight.grad == 0).any()


def test_stacks_that_cannot_have_it_refuse_it():
    sizes = {"input_size": 3, "hidden_size": 4, "weight_drop": 0.1}
    with pytest.raises(UsageError, match="Window: weight_drop=0.1 is not supported"):
        WindowConfig(cell="lstm", **sizes, symbols=3)
    stack = Stack(StackConfig(cell="lstm", **sizes))
    prune.l1_unstructured(stack.cells[0], "weight_h", 0.3)
    with pytest.raises(UsageError, match="LSTM: weight_drop is not possible on .* parametrization: weight_h"):
        stack(torch.zeros(2, 1, 3))
    stack.eval()(torch.zeros(2, 1, 3))
    with pytest.raises(UsageError, match="weight_drop=0.1, but the cell mingru has no recurrent matrix"):
        Stack(StackConfig(cell="mingru", **sizes))
