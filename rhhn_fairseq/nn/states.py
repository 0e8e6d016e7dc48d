"""Functions on the states of layers: one tensor or a tuple of tensors, [D L, B, width] each."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

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

    It starts a decoder of twice the widths in one direction, with ``lstm_state=True`` too.
    """
    return map_state(lambda entry: torch.cat((entry[0::2], entry[1::2]), dim=-1), state)


def join_entries(entries: Sequence[Tensor]) -> Tensor:
    """Joins entries of a state so that two results side by side are that of entries of twice the widths.

    As many groups as the widths' greatest common divisor each hold an equal share of every entry.
    """
    groups = math.gcd(*(entry.shape[-1] for entry in entries))
    return torch.cat([entry.unflatten(-1, (groups, -1)) for entry in entries], dim=-1).flatten(-2)


def split_entries(joined: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Splits what ``join_entries`` has joined."""
    groups = math.gcd(*widths)
    shares = joined.unflatten(-1, (groups, -1)).split([width // groups for width in widths], dim=-1)
    return [share.flatten(-2) for share in shares]
