"""Plain LSTM and GRU from torch.nn: cuDNN on a GPU, oneDNN's LSTM on a CPU.

The cell keeps its weights. torch.nn adds a second bias, which is created for the call: it holds the LSTM's
constant forget bias, or the GRU's bias inside the reset gate.

Shapes: T time, B batch, C input, H hidden, G gates times H; gates i, f, g, o or r, z, n as in the cells.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rhhn_fairseq.ops.loop import State

MOST_PADDING = 4
"""Positions, for each of the batch, up to which the pieces between resets are padded and not packed."""


class Weights(NamedTuple):
    """A layer's weights in torch.nn's order: [G, C], [G, H], [G] and [G]; the second bias is None if it
    is zero."""

    weight_x: Tensor
    weight_h: Tensor
    bias: Tensor
    second: Tensor | None


def run(
    kind: str,
    x_TBC: Tensor,
    state: State,
    weights: Weights,
    training: bool,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Runs an LSTM or a GRU over a sequence.

    Args:
        kind: ``lstm`` or ``gru``.
        state: (h, c) or (h,), tensors [B, H].
        training: whether cuDNN has to keep what its backward pass needs.
        batch_sizes: of a GRU over packed sequences, whose data ``x_TBC`` then is; see ``PackedSequence``.

    Returns:
        the outputs [T, B, H], and the last state in the types of ``state``.
    """
    dtype = x_TBC.dtype
    states = [tensor.to(dtype).unsqueeze(0).contiguous() for tensor in state]
    second = torch.zeros_like(weights.bias) if weights.second is None else weights.second
    flat = [tensor.to(dtype).contiguous() for tensor in (*weights[:3], second)]
    keeps = training or torch.is_grad_enabled()
    if batch_sizes is not None:
        y_TBH, *after = torch.gru(x_TBC, batch_sizes, states[0], flat, True, 1, 0.0, keeps, False)
    elif kind == "lstm":
        y_TBH, *after = torch.lstm(x_TBC, states, flat, True, 1, 0.0, keeps, False, False)
    else:
        y_TBH, *after = torch.gru(x_TBC, states[0], flat, True, 1, 0.0, keeps, False, False)
    return y_TBH, tuple(new.squeeze(0).to(old.dtype) for new, old in zip(after, state, strict=True))


def run_between_resets(
    kind: str, x_TBC: Tensor, resets_TB1: Tensor, state: State, weights: Weights, training: bool
) -> tuple[Tensor, State]:
    """Runs a GRU over the pieces between resets, side by side; other arguments as for ``run``.

    Pieces are padded, or packed where most of the work would be padding. An LSTM's fused operation is faster.
    """
    T, B, C = x_TBC.shape
    starts = torch.cat((torch.ones_like(resets_TB1[:1]), resets_TB1[1:])).squeeze(-1).T.flatten()
    # Positions are counted row by row, pieces from the longest on.
    first, piece = starts.nonzero().flatten(), starts.cumsum(0) - 1
    step = torch.arange(T * B, device=x_TBC.device) - first[piece]
    order = piece.bincount().argsort(descending=True)
    first, slots = first[order], step * len(first) + order.argsort()[piece]
    before = state[0].index_select(0, first // T)
    cleared = resets_TB1.squeeze(-1).T.flatten()[first] | (first % T > 0)
    before, x = before.masked_fill(cleared.unsqueeze(1), 0.0), x_TBC.transpose(0, 1).flatten(0, 1)
    sizes = step.bincount()
    padded = len(sizes) * len(first)
    if padded <= MOST_PADDING * T * B:
        x = x.new_zeros(padded, C).index_copy(0, slots, x).view(len(sizes), len(first), C)
        y = run(kind, x, (before,), weights, training)[0].flatten(0, 1).index_select(0, slots)
    else:
        x = x.index_select(0, slots.argsort())
        y = run(kind, x, (before,), weights, training, sizes)[0].index_select(0, slots.argsort().argsort())
    y_TBH = y.view(B, T, -1).transpose(0, 1).contiguous()
    return y_TBH, (y_TBH[-1].to(state[0].dtype, copy=True),)


def run_padded(
    kind: str, x_TBC: Tensor, mask_TB: Tensor, state: State, weights: Weights, training: bool
) -> tuple[Tensor, State]:
    """Runs a GRU over sequences with padding anywhere; other arguments as for ``run``.

    The real positions move to the start of each sequence, where what follows them changes no output.
    """
    order = (~mask_TB).byte().argsort(dim=0, stable=True).unsqueeze(-1)
    y_TBH, _ = run(kind, x_TBC.take_along_dim(order, 0), state, weights, training)
    states = torch.cat((state[0].to(y_TBH.dtype).unsqueeze(0), y_TBH))
    last = states.take_along_dim(mask_TB.sum(0).view(1, -1, 1), 0).squeeze(0).to(state[0].dtype)
    y_TBH = torch.zeros_like(y_TBH).scatter(0, order.expand_as(y_TBH), y_TBH)
    return y_TBH.masked_fill(~mask_TB.unsqueeze(-1), 0.0), (last,)


def step(kind: str, x_1BC: Tensor, state: State, weights: Weights) -> tuple[Tensor, State]:
    """Runs one step by torch's cells, which copy no weights."""
    dtype = x_1BC.dtype
    second = weights.second
    if second is None and x_1BC.is_cuda:
        # On CUDA, torch's cells take both biases or none.
        second = torch.zeros_like(weights.bias)
    # torch's annotations do not say that the second bias may be missing.
    flat: list[Any] = [None if tensor is None else tensor.to(dtype) for tensor in (*weights[:3], second)]
    before = tuple(tensor.to(dtype) for tensor in state)
    if kind == "lstm":
        after: State = torch.lstm_cell(x_1BC[0], before, *flat)
    else:
        after = (torch.gru_cell(x_1BC[0], *before, *flat),)
    # The output is a copy, because it may be changed in place.
    y_1BH = after[0].unsqueeze(0).clone()
    return y_1BH, tuple(new.to(old.dtype) for new, old in zip(after, state, strict=True))
