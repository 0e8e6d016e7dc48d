"""Functions on the states of layers: one tensor or a tuple of tensors, [D L, B, width] each."""

import torch
from torch import Tensor

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.loop import State


def map_state(change, state: Tensor | State) -> Tensor | State:
    """Applies ``change`` to every entry of a state."""
    return change(state) if isinstance(state, Tensor) else tuple(change(entry) for entry in state)


def detach_state(state: Tensor | State) -> Tensor | State:
    """Returns the state without its history, where truncated back-propagation stops."""
    return map_state(torch.Tensor.detach, state)


def reorder_state(state: Tensor | State, index_B: Tensor) -> Tensor | State:
    """Returns the states of chosen sequences: whole numbers, which may repeat as in beam search."""
    return map_state(lambda entry: entry.index_select(1, index_B), state)


def select_state(state: Tensor | State, chosen_B: Tensor, other: Tensor | State) -> Tensor | State:
    """Returns ``state`` for the sequences for which ``chosen_B``, bool [B], is true, else ``other``."""
    rest = iter((other,) if isinstance(other, Tensor) else other)
    return map_state(lambda entry: torch.where(chosen_B.unsqueeze(-1), entry, next(rest)), state)


def join_directions(state: Tensor | State) -> Tensor | State:
    """Returns the state of a bidirectional layer with both directions side by side, [L, B, 2 width].

    It starts a decoder of twice the width in one direction. The ``c`` of a layer with ``lstm_state=True``
    holds several entries, which would be mixed up: join the state of a layer without that option.

    Raises:
        UsageError: the number of rows is odd, so the state is not that of a bidirectional layer.
    """

    def join(entry: Tensor) -> Tensor:
        if len(entry) % 2:
            raise UsageError(f"join_directions: {len(entry)} rows are not those of two directions")
        return torch.cat((entry[0::2], entry[1::2]), dim=-1)

    return map_state(join, state)
