"""Plain LSTM and GRU as torch.nn has them: cuDNN's on a GPU, oneDNN's LSTM on a CPU.

It serves a pass that asks for nothing more: no layer normalisation, noise, mask or expectation of zoneout.
The weights stay the cell's; the second bias that torch.nn adds, the LSTM's forget bias or the GRU's own, is
made for the call.

Shapes: T time, B batch, C input, H hidden; gates i, f, g, o or r, z, n as in the cells.
"""

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Cell, Noise, State
from rhhn_fairseq.cells.gru import GRU
from rhhn_fairseq.cells.lstm import LSTM
from rhhn_fairseq.kernels.precision import matmul_precision

NAME = "torch_nn"

NARROW = 384
"""Units up to which it is the faster one on a CPU.

Measured forward and backward with 1 to 256 sequences and two threads: for an LSTM 0.6 to 1.0 times the time
of the compiled program (above, 1.0 to 1.6 times), for a GRU 0.8 to 1.06 times that of the loop.
"""


def pays(cell: Cell, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a pass without obstacles is done sooner here: on a GPU always, on a CPU if the cell is narrow.

    On a CPU in float32 alone, since states of a narrow type would not be float32 in between. On a GPU not
    under autocast to bfloat16: torch casts what cuDNN's LSTM and GRU read to float16, whatever was asked for.
    """
    if device.type == "cuda":
        autocast = torch.is_autocast_enabled("cuda")
        return not autocast or torch.get_autocast_dtype("cuda") == torch.float16
    if device.type != "cpu":
        return False
    exactly = matmul_precision("cpu") == "highest" and not torch.is_autocast_enabled("cpu")
    return dtype == torch.float32 and cell.config.hidden_size <= NARROW and exactly


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


def step(cell: Cell, x_1BC: Tensor, state: State) -> tuple[Tensor, State]:
    """The same for one step by torch's cells, which read the weights where they lie; without a gradient."""
    dtype, before = x_1BC.dtype, state
    state = tuple(part.to(dtype) for part in state)
    *weights, second = _weights(cell)
    if second is None and x_1BC.is_cuda:
        # There torch's cells take both biases or none.
        second = torch.zeros_like(cell.bias)
    weights = [None if part is None else part.to(dtype) for part in (*weights, second)]
    if isinstance(cell, LSTM):
        after = torch.lstm_cell(x_1BC[0], state, *weights)
    else:
        after = (torch.gru_cell(x_1BC[0], *state, *weights),)
    return after[0].unsqueeze(0), tuple(new.to(old.dtype) for new, old in zip(after, before, strict=True))


def _lstm(cell: LSTM, x_TBC: Tensor, states: list[Tensor], dtype) -> tuple[Tensor, ...]:
    return torch.lstm(x_TBC, states, _flat(cell, dtype), True, 1, 0.0, _keeps(cell), False, False)


def _gru(cell: GRU, x_TBC: Tensor, states: list[Tensor], dtype) -> tuple[Tensor, ...]:
    return torch.gru(x_TBC, states[0], _flat(cell, dtype), True, 1, 0.0, _keeps(cell), False, False)


def _keeps(cell: Cell) -> bool:
    """Whether cuDNN is to keep what its backward pass needs, which it does in training alone."""
    return cell.training or torch.is_grad_enabled()


def _weights(cell: Cell) -> tuple[Tensor | None, ...]:
    """The weights in torch.nn's order, [G, C], [G, H] and two biases [G], the second None if it is zero."""
    second = None
    if isinstance(cell, GRU):
        second = torch.nn.functional.pad(cell.bias_n, (2 * len(cell.bias_n), 0))
    elif cell.config.forget_bias:
        second = torch.zeros_like(cell.bias)
        second.view(4, -1)[1] = cell.config.forget_bias
    return cell.weight_x.t(), cell.weight_h.t(), cell.bias, second


def _flat(cell: Cell, dtype) -> list[Tensor]:
    """The same as torch.nn lays them out."""
    *weights, second = _weights(cell)
    weights.append(torch.zeros_like(cell.bias) if second is None else second)
    return [part.to(dtype).contiguous() for part in weights]
