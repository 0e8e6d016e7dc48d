"""Stacks against the same cells composed by hand, and against torch.nn.LSTM."""

import pytest
import torch
from torch.nn.functional import dropout

from rhhn_fairseq.cells import CELLS, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import Stack, StackConfig

C, H, T, B = 4, 6, 7, 3


def _stack(cell="lstm", seed=0, input_size=C, **options):
    torch.manual_seed(seed)
    small = {"hyper_size": 3} if "hyper_size" in cell_options(cell) else {}
    small |= options.pop("cell_options", {})
    config = StackConfig(cell=cell, input_size=input_size, hidden_size=H, cell_options=small, **options)
    return Stack(config).double()


def _x(width=C, T=T):
    return torch.randn(T, B, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("cell", CELLS)
def test_any_cell_carries_its_state(cell):
    stack = _stack(cell, layers=2, residual_from=2).eval()
    whole, final = stack(_x())
    head, middle = stack(_x()[:3])
    tail, last = stack(_x()[3:], middle)
    torch.testing.assert_close(torch.cat([head, tail]), whole, rtol=0, atol=1e-13)
    assert tuple(part.shape[1] for part in last) == stack.state_sizes
    for one, other in zip(last, final, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side):
    stack = _stack("gru", layers=3, bidirectional_layers=1, residual_from=3)
    lengths, x = [7, 4, 2], _x()
    mask = torch.zeros(T, B, dtype=torch.bool)
    padded = torch.full_like(x, float("nan"))
    places = []
    for b, n in enumerate(lengths):
        place = slice(T - n, T) if side == "left" else slice(0, n)
        mask[place, b] = True
        padded[place, b] = x[:n, b]
        places.append(place)
    y, _ = stack(padded, mask_TB=mask)
    assert (y[~mask] == 0).all()
    for b, n in enumerate(lengths):
        alone, _ = stack(x[:n, b : b + 1])
        torch.testing.assert_close(y[places[b], b], alone[:, 0], rtol=0, atol=1e-13)


RATES = {"input_dropout": 0.2, "layer_dropout": 0.4, "output_dropout": 0.6}


def test_each_dropout_acts_at_its_place():
    """Against the layers called by hand, which draw the masks in the same order."""
    stack = _stack(layers=2, residual_from=2, **RATES).train()
    torch.manual_seed(0)
    y = stack(_x())[0]
    torch.manual_seed(0)
    first = stack.cells[0](dropout(_x(), 0.2))[0]
    second = stack.cells[1](dropout(first, 0.4))[0] + first
    torch.testing.assert_close(y, dropout(second, 0.6), rtol=0, atol=0)


def test_evaluation_drops_nothing_and_one_mask_may_serve_a_sequence():
    stack = _stack(layers=2, dropout_mask="sequence", **RATES)
    y = stack.train()(_x())[0]
    assert torch.equal(y[0] == 0, y[-1] == 0) and (y[0] == 0).any()
    assert torch.equal(stack.eval()(_x())[0], _stack(layers=2).eval()(_x())[0])


def test_every_cell_gets_its_own_noise():
    """First the forward cells', then the backward cells'."""
    stack = _stack(layers=1, bidirectional_layers=1, cell_options={"zoneout": 0.5}).train()
    noise = [cell.sample_noise(T, B) for cell in (*stack.cells, *stack.backward_cells)]
    y = stack(_x(), noise=noise)[0]
    forwards = stack.cells[0](_x(), noise=noise[0])[0]
    backwards = stack.backward_cells[0](_x().flip(0), noise=noise[1])[0].flip(0)
    torch.testing.assert_close(y, torch.cat([forwards, backwards], dim=-1), rtol=0, atol=0)


def test_diagnostics_name_the_layer():
    assert set(_stack("hyperlstm", layers=2).diagnostics()) == {"layer1_scaling_rank", "layer2_scaling_rank"}
    assert _stack("lstm").diagnostics() == {}


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"layers": 0}, "layers=0 is too small"),
        ({"layers": 2, "bidirectional_layers": 3}, "bidirectional_layers=3 is more than layers=2"),
        ({"layers": 2, "residual_from": 3}, "past the last of 2 layers"),
        ({"layers": 2, "residual_from": 1}, "layer 1 reads a width of 4 and gives 6"),
        ({"layers": 2, "input_dropout": 1.0}, "input_dropout=1.0 is too large"),
        ({"cell": "nothing"}, "unknown cell 'nothing'"),
        ({"cell_options": {"colour": 1}}, "no option 'colour'"),
    ],
)
def test_impossible_stacks_are_refused(options, reason):
    with pytest.raises(UsageError, match=reason):
        config = {"cell": "lstm", "input_size": C, "hidden_size": H} | options
        Stack(StackConfig(**config))


def test_state_of_a_bidirectional_stack_is_refused():
    stack = _stack(layers=1, bidirectional_layers=1)
    _, final = stack(_x())
    with pytest.raises(UsageError, match="cannot start from a state"):
        stack(_x(), final)
    with pytest.raises(UsageError, match="state has 1 tensors, expected 2"):
        _stack()(_x(), final[:1])
