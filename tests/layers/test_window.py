"""Stacks with a window over a text: where they drop units, and that evaluation draws nothing."""

import pytest
import torch
from torch.nn.functional import dropout

from rhhn_fairseq.layers.window import WindowConfig, WindowStack, one_hot

SYMBOLS = 7


def _stack(layers=1, **options):
    torch.manual_seed(0)
    sizes = {"input_size": 3, "hidden_size": 6, "layers": layers, "symbols": SYMBOLS, "window": 2}
    return WindowStack(WindowConfig(cell="lstm", **sizes, **options)).double()


def test_matrices_that_steps_share_are_assembled_once_a_pass(monkeypatch):
    sizes = {"input_size": 3, "hidden_size": 6, "symbols": SYMBOLS, "layers": 1}
    config = WindowConfig(cell="rolled_hyperrhn", cell_options={"rhn_depth": 2, "hyper_size": 3}, **sizes)
    stack, calls = WindowStack(config).double(), []
    cell = stack.each_cell()[0]
    assembled = cell.recurrent_matrices
    monkeypatch.setattr(cell, "recurrent_matrices", lambda: calls.append(0) or assembled())
    stack(*_inputs())
    assert len(calls) == 1


def _inputs():
    text = one_hot(torch.tensor([[0, 3], [2, 5]]), SYMBOLS, torch.float64)
    return torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64), text


@pytest.mark.parametrize("layers", [1, 2])
def test_each_dropout_acts_at_its_place(layers):
    """Against the layers called by hand, which draw the masks in the same order."""
    stack = _stack(layers, input_dropout=0.2, layer_dropout=0.4, output_dropout=0.6).train()
    x, text = _inputs()
    torch.manual_seed(0)
    y = stack(x, text)[0]
    torch.manual_seed(0)
    expected, trace, _ = stack.first(dropout(x, 0.2), text)
    if layers == 2:
        read = torch.cat([dropout(expected, 0.4), trace.window_TBV], dim=-1)
        expected = stack.upper.cells[0](read)[0]
    torch.testing.assert_close(y, dropout(expected, 0.6), rtol=0, atol=0)


@pytest.mark.parametrize("start, depends", [("zeros", False), ("first", True)])
def test_the_first_step_reads_the_first_character_where_it_is_asked_to(start, depends):
    stack = _stack(window_start=start).eval()
    x, text = _inputs()
    other = text.roll(1, dims=-1)
    assert torch.equal(stack(x, text)[0][0], stack(x, other)[0][0]) != depends
    # A pass that goes on from a state reads what the window saw last, not the beginning again.
    whole = stack(x, text)[0]
    _, state, _ = stack(x[:2], text)
    torch.testing.assert_close(stack(x[2:], text, state)[0], whole[2:], rtol=0, atol=0)
