"""Plain LSTM and GRU as torch.nn has them, which on a GPU means cuDNN.

It serves a pass that asks for nothing more: no layer normalisation, noise, mask or expectation of zoneout.
The weights stay the cell's; the second bias that torch.nn adds is made of zeros for the call.

Shapes: T time, B batch, C input, H hidden; gates i, f, g, o or r, z, n as in the cells.
"""

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Cell, Noise, State
from rhhn_fairseq.cells.gru import GRU
from rhhn_fairseq.cells.lstm import LSTM

NAME = "torch_nn"


def obstacle(cell: Cell, mask_TB: Tensor | None, noise: Noise | None) -> str | None:
    """Why torch.nn cannot make this pass; None if it can."""
    if type(cell) not in (LSTM, GRU):
        return "torch.nn has LSTM and GRU only"
    if getattr(cell.config, "layer_norm", False):
        return "torch.nn has no layer normalisation"
    if noise:
        return f"torch.nn has no {', '.join(sorted(noise))}"
    if cell.config.zoneout or getattr(cell.config, "zoneout_c", 0.0):
        return "torch.nn has no zoneout"
    if mask_TB is not None:
        return "torch.nn has no padding masks"
    return None


def run(cell: Cell, x_TBC: Tensor, state: State) -> tuple[Tensor, State]:
    """``Cell.forward`` for a pass without obstacles."""
    dtype = x_TBC.dtype
    states = [part.to(dtype).unsqueeze(0).contiguous() for part in state]
    run = _lstm if isinstance(cell, LSTM) else _gru
    y_TBH, *after = run(cell, x_TBC, states, dtype)
    return y_TBH, tuple(new.squeeze(0).to(old.dtype) for new, old in zip(after, state, strict=True))


def _lstm(cell: LSTM, x_TBC: Tensor, states: list[Tensor], dtype) -> tuple[Tensor, ...]:
    bias = cell.bias
    if cell.config.forget_bias:
        constant = torch.zeros_like(bias).view(4, -1)
        constant[1] = cell.config.forget_bias
        bias = bias + constant.view(-1)
    weights = _flat(cell, bias, torch.zeros_like(bias), dtype)
    return torch.lstm(x_TBC, states, weights, True, 1, 0.0, cell.training, False, False)


def _gru(cell: GRU, x_TBC: Tensor, states: list[Tensor], dtype) -> tuple[Tensor, ...]:
    second = torch.nn.functional.pad(cell.bias_n, (2 * len(cell.bias_n), 0))
    weights = _flat(cell, cell.bias, second, dtype)
    return torch.gru(x_TBC, states[0], weights, True, 1, 0.0, cell.training, False, False)


def _flat(cell: Cell, bias: Tensor, second: Tensor, dtype) -> list[Tensor]:
    """The weights in torch.nn's order and layout."""
    parts = (cell.weight_x.t(), cell.weight_h.t(), bias, second)
    return [part.to(dtype).contiguous() for part in parts]
