"""Products of a few rows without a gradient, as in decoding one sentence, by compiled code; the LSTM's step.

A step of a beam of five reads every weight for five rows, and libraries pack a matrix for the many rows that
do not come; ``native/product.cpp`` only reads it.

Shapes: M rows, K input, N output; B batch, C input, H hidden.
"""

import logging
import os

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Cell, State
from rhhn_fairseq.cells.lstm import LSTM
from rhhn_fairseq.kernels import matmul, native
from rhhn_fairseq.kernels.precision import matmul_precision
from rhhn_fairseq.layers.product import affine

logger = logging.getLogger(__name__)

ROWS = range(2, 9)
"""Numbers of rows there is a function for; a single one is read at memory's speed by libraries too."""

SMALLEST_WEIGHT = 2**17
"""Elements below which starting it costs as much as it saves."""

SMALLEST_INPUT = 64
"""Width of the input below which rows of a transposed weight are too short for it."""

_told = False


def product(x: Tensor, weight_KN: Tensor, add: Tensor | None = None) -> Tensor | None:
    """``x @ weight + add``; None where another way is as good or this one cannot go.

    Args:
        x: [..., K]. weight_KN: stored by rows or, as a transpose is, by columns.
        add: [N] or [M, N]; None for nothing.
    """
    if not chosen(x, weight_KN, add):
        return None
    _tell()
    y = x.new_empty(*x.shape[:-1], weight_KN.shape[1])
    native.product(x.contiguous(), weight_KN, None if add is None else add.contiguous(), y)
    return y


def chosen(x: Tensor, weight_KN: Tensor, add: Tensor | None = None) -> bool:
    """Whether ``product`` does it."""
    K, N = weight_KN.shape
    if not (K * N >= SMALLEST_WEIGHT and K >= SMALLEST_INPUT and x.numel() // K in ROWS):
        return False
    # Whatever does not fit is torch's to refuse, or to broadcast.
    if x.shape[-1] != K:
        return False
    if add is not None and (add.shape[-1] != N or add.dim() != 1 and add.shape[:-1] != x.shape[:-1]):
        return False
    parts = (x, weight_KN) if add is None else (x, weight_KN, add)
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and os.environ.get("RHHN_KERNEL", "native") == "native"
        and all(part.dtype == torch.float32 and part.device.type == "cpu" for part in parts)
        and 1 in weight_KN.stride()
        and native.multiplies()
        and (os.environ.get(matmul.VARIABLE) or "native") == "native"
        and matmul_precision("cpu") != "medium"
    )


def steps(cell: Cell, state: State) -> bool:
    """Whether ``lstm_step`` does a step of a cell that torch.nn could do."""
    return type(cell) is LSTM and chosen(state[0], cell.weight_h)


def lstm_step(cell: LSTM, x_1BC: Tensor, state: State) -> tuple[Tensor, State]:
    """One step of a plain LSTM, as ``Cell.forward`` returns it."""
    h, c = state
    a = affine(h, cell.weight_h, affine(x_1BC[0], cell.weight_x, cell.bias))
    h, c = native.lstm_gates(a, c, cell.config.forget_bias)
    return h.unsqueeze(0), (h, c)


def _tell() -> None:
    """Says once that it is used."""
    global _told
    if not _told:
        _told = True
        logger.info("products of %d to %d rows run on the native backend (cpu, float32)", ROWS[0], ROWS[-1])
