"""Cells that take one step at a time, against torch's and against the layers."""

import pickle

import pytest
import torch
from torch import nn

import rhhn_fairseq.nn as layers
from rhhn_fairseq.cells import CELLS, cell_options
from rhhn_fairseq.errors import UsageError

C, H, T, B = 5, 8, 4, 3


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_equals_torchs_cell(kind):
    torch.manual_seed(0)
    theirs = getattr(nn, f"{kind}Cell")(C, H)
    options = {"forget_bias": 0.0} if kind == "LSTM" else {}
    ours = getattr(layers, f"{kind}Cell")(C, H, **options)
    with torch.no_grad():
        ours.cell.weight_x.copy_(theirs.weight_ih.T)
        ours.cell.weight_h.copy_(theirs.weight_hh.T)
        split = 2 * H if kind == "GRU" else 4 * H
        ours.cell.bias.copy_(theirs.bias_ih)
        ours.cell.bias[:split] += theirs.bias_hh[:split]
        if kind == "GRU":
            ours.cell.bias_n.copy_(theirs.bias_hh[split:])
    results = []
    for cell, weight in ((ours, ours.cell.weight_h), (theirs, theirs.weight_hh)):
        state = None
        for x in torch.randn(T, B, C, generator=torch.Generator().manual_seed(1)):
            state = cell(x, state)
        entries = state if isinstance(state, tuple) else (state,)
        sum(entry.square().sum() for entry in entries).backward()
        results.append((type(state), entries, weight.grad if cell is theirs else weight.grad.T))
    (ours_type, ours_state, ours_grad), (their_type, their_state, their_grad) = results
    assert ours_type is their_type
    # Single precision.
    torch.testing.assert_close(ours_state, their_state, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours_grad, their_grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_steps_of_any_cell_equal_its_layer(cell):
    small = {"hyper_size": 3} if "hyper_size" in cell_options(cell) else {}
    layer = layers.layer_of(cell)(C, H, **small, dtype=torch.float64)
    steps = getattr(layers, f"{type(layer).__name__}Cell")(C, H, **small, dtype=torch.float64)
    steps = pickle.loads(pickle.dumps(steps))
    steps.cell.load_state_dict(layer.stack.cells[0].state_dict())
    x = torch.randn(T, B, C, dtype=torch.float64)
    y, last = layer(x)
    _, start = layer(x[:1])
    state = single = start[0] if isinstance(start, torch.Tensor) else tuple(entry[0] for entry in start)
    single = tuple(entry[1] for entry in single) if isinstance(single, tuple) else single[1]
    for t in range(1, T):
        state, single = steps(x[t], state), steps(x[t, 1], single)
        h, h_1 = (each[0] if isinstance(each, tuple) else each for each in (state, single))
        torch.testing.assert_close(h, y[t], rtol=0, atol=1e-13)
        torch.testing.assert_close(h_1, y[t, 1], rtol=0, atol=1e-13)
    entries = state if isinstance(state, tuple) else (state,)
    for entry, expected in zip(entries, (last,) if isinstance(last, torch.Tensor) else last, strict=True):
        torch.testing.assert_close(entry, expected[0], rtol=0, atol=1e-13)


def test_cells_refuse_other_shapes_and_start_missing_entries_from_zeros():
    cell = layers.HyperLSTMCell(C, H, hyper_size=3)
    assert repr(cell).startswith("HyperLSTMCell(5, 8, layer_norm=False, hyper_size=3")
    x, h = torch.randn(B, C), torch.randn(B, H)
    full = (h, h, torch.zeros(B, 3), torch.zeros(B, 3))
    assert all(map(torch.equal, cell(x, (h, h)), cell(x, full)))
    assert [entry.shape for entry in cell(x[:0])] == [(0, H), (0, H), (0, 3), (0, 3)]
    torch.manual_seed(0)
    fresh = layers.HyperLSTMCell(C, H, hyper_size=3)
    torch.manual_seed(0)
    cell.reset_parameters()
    assert all(map(torch.equal, cell.parameters(), fresh.parameters()))
    with pytest.raises(UsageError, match=r"^HyperLSTMCell: input is \(3, 4\), expected \[B, 5\] or \[5\]"):
        cell(torch.randn(B, 4))
    with pytest.raises(UsageError, match="^LNLSTMCell: state has shapes"):
        layers.LNLSTMCell(C, H)(x, (h, h[:1]))


def test_a_step_with_gradient_copies_no_weight():
    """``torch.lstm`` would take a copy of every transposed weight."""
    cell = layers.LSTMCell(C, H)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cell(torch.randn(B, C))
    assert "aten::lstm_cell" in {event.key for event in profile.key_averages()}
