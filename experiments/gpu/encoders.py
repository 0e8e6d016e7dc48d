"""Plain LSTM and GRU layers over right-padded sentences without a mask, so that cuDNN can run them.

What follows a sentence cannot change its outputs, so only the last state needs care. A GRU's is its output at
the last position. An LSTM's cell state is no output, and cuDNN returns that after the padding. So the input
gets a column that is 1 at padding, and its weights close the input gate and open the forget gate: sigmoid
is then exactly 0 and 1, and c passes through the padding unchanged, forward and backward. Lengths stay on the
device. fairseq pads sources on the left by default; ``--left-pad-source False`` pads them on the right.

Expected: for an LSTM no gain. Triton's kernels in CUDA graphs took 0.82 times cuDNN's time at 1000 units, so
cuDNN can only win where lengths vary too much for recordings. A GRU with a mask already takes cuDNN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.backends import torch_nn
from rhhn_fairseq.ops.loop import State

# It closes and opens gates: exp(-1e4) is zero in every type, and float16 holds it.
CLOSED = 1e4
# Added for the one that marks padding, so that matrix units still find a multiple of 8.
COLUMNS = 8


def run_right_padded(cell: Cell, x_TBC: Tensor, lengths_B: Tensor, reverse=False) -> tuple[Tensor, State]:
    """Runs ``lstm`` or ``gru`` from zeros over sentences of 1 step or more, each from its end if reversed.

    Returns:
        outputs [T, B, H], zero at padding, and the state after each sentence's last step.
    """
    T, B, _ = x_TBC.shape
    step_T11 = torch.arange(T, device=x_TBC.device).view(-1, 1, 1)
    last_B1 = lengths_B.unsqueeze(1) - 1
    real_TB1 = step_T11 <= last_B1
    order_TB1 = torch.where(real_TB1, last_B1 - step_T11, step_T11)
    if reverse:
        x_TBC = x_TBC.take_along_dim(order_TB1, 0)
    # A NaN times a zero gradient is NaN, so padding is cleared.
    x_TBC, weights = x_TBC.masked_fill(~real_TB1, 0.0), cell.torch_weights()
    if cell.operation == "lstm":
        H = weights.weight_h.shape[1]
        gates = weights.weight_x.new_zeros(4, H, COLUMNS)
        gates[0, :, 0], gates[1, :, 0] = -CLOSED, CLOSED
        weights = weights._replace(weight_x=torch.cat([weights.weight_x, gates.flatten(0, 1)], dim=1))
        marks = F.pad((~real_TB1).to(x_TBC.dtype), (0, COLUMNS - 1))
        x_TBC = torch.cat([x_TBC, marks], dim=-1)
    start = cell.zero_state(B, x_TBC.device, x_TBC.dtype)
    y_TBH, state = torch_nn.run(cell.operation, x_TBC, start, weights, cell.training)
    h = y_TBH.take_along_dim(last_B1.unsqueeze(0), 0).squeeze(0)
    y_TBH = y_TBH.masked_fill(~real_TB1, 0.0)
    return (y_TBH.take_along_dim(order_TB1, 0) if reverse else y_TBH), (h, *state[1:])
