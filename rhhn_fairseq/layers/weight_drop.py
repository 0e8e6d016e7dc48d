"""Weight drop: every pass leaves out a new random choice of connections of the recurrent matrices.

Merity et al. 2018, section 2; Wan et al. 2013 call it DropConnect. One mask serves all steps of a pass, so
the fused operations need no change.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rhhn_fairseq.cells.running import Cell


def call_with_dropped_weights(cell: Cell, rate: float, *arguments):
    """Calls ``cell(*arguments)`` with each weight of its recurrent matrices set to zero with probability
    ``rate``, and the others divided by 1 - ``rate``."""
    dropped = {name: F.dropout(weight, rate) for name, weight in recurrent_weights(cell).items()}
    return torch.func.functional_call(cell, dropped, arguments)


def recurrent_weights(cell: Cell) -> dict[str, Tensor]:
    """Returns by name the matrices that multiply a state of the cell, or of a cell inside it."""
    weights: dict[str, Tensor] = {}
    for prefix, module in cell.named_modules():
        named = module.weights_named("recurrent_weights") if isinstance(module, Cell) else {}
        for name, weight in named.items():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(weight, nn.ParameterList):
                weights |= {f"{path}.{i}": matrix for i, matrix in enumerate(weight)}
            else:
                weights[path] = weight
    return weights
