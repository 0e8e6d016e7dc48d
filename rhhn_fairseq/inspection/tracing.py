"""Records the inputs and states of a network's cells, symbol by symbol.

Shapes: T symbols, C a cell's input, D entries of the dictionary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.loop import State

# Each symbol is a separate step.
MOST_SYMBOLS = 20_000


@dataclass(frozen=True)
class CellTrace:
    """The inputs and states of one cell of a stack while it reads a text.

    Attributes:
        number: of the cell's layer, counted from 1. x_TC: its input.
        before, after: its state before and after each step, tensors [T, ·] in ``state_sizes`` order.
    """

    number: int
    cell: Cell
    x_TC: Tensor
    before: State
    after: State

    @classmethod
    def of(cls, number: int, cell: Cell, taken: list[tuple[Tensor, State, State]]) -> "CellTrace":
        """Returns the trace of the steps that ``recorded`` has taken of one sequence."""
        x, *states = zip(*taken, strict=True)
        before, after = (tuple(map(torch.cat, zip(*each, strict=True))) for each in states)
        return cls(number, cell, torch.cat(x), before, after)


@torch.no_grad()
def trace(model: nn.Module, entries: Sequence[int]) -> tuple[list[CellTrace], Tensor]:
    """Runs a character language model on a text from the zero state.

    Args:
        model: has ``embed``, ``stack`` and ``output``, as ``CharLM`` does; it is put into evaluation mode.
        entries: T dictionary indices.

    Returns:
        a trace for each cell, the lowest layer first, and the logits [T, D] of each next symbol.
    """
    model.eval()
    device = next(model.parameters()).device
    state, logits = None, []
    with recorded(model.stack.cells) as steps:
        for entry in entries:
            y, state = model.stack(model.embed(torch.tensor([[entry]], device=device)), state)
            logits.append(model.output(y[-1]))
    cells = enumerate(zip(model.stack.cells, steps, strict=True), start=1)
    return [CellTrace.of(number, *pair) for number, pair in cells], torch.cat(logits)


def check_length(symbols: int) -> None:
    """Raises UsageError for a text without symbols or with too many."""
    if not 1 <= symbols <= MOST_SYMBOLS:
        raise UsageError(f"the text has {symbols:,} symbols, it may have 1 to {MOST_SYMBOLS:,}")


@contextmanager
def recorded(cells: Sequence[Cell]) -> Iterator[list[list[tuple[Tensor, State, State]]]]:
    """Records (input [1, C], state before, state after) of each step in a list for each cell."""
    steps: list[list[tuple[Tensor, State, State]]] = [[] for _ in cells]

    def hook_of(taken):
        def hook(cell, arguments, result):
            x_TBC, state = arguments[0], arguments[1]
            if state is None:
                state = cell.zero_state(x_TBC.shape[1], x_TBC.device, x_TBC.dtype)
            taken.append((x_TBC[-1], state, result[1]))

        return hook

    handles = [cell.register_forward_hook(hook_of(taken)) for cell, taken in zip(cells, steps, strict=True)]
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()
