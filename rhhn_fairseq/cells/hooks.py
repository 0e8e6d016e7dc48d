"""Hooks of a cell's inner modules, which torch would call around ``forward``, and what a pass can tell."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.running import Cell, is_hooked
from rhhn_fairseq.errors import UsageError


def with_hooks(cell: nn.Module, method: Callable, *arguments):
    """Calls ``method(*arguments)`` of an inner cell, with the hooks that are registered on that cell.

    Hooks see the method's arguments and result. An inner cell runs step by step, so ``forward``, around which
    torch would call them, is never called.

    Raises:
        UsageError: the cell has a backward hook, for which torch finds no tensors in the tuples, or a forward
            pre-hook, as pruning registers, which would run after its input weights were read; or
            torch.compile traces the pass.
    """
    if not is_hooked(cell):
        return method(*arguments)
    if cell._backward_hooks or cell._backward_pre_hooks:
        raise UsageError(
            f"a backward hook on an inner {type(cell).__name__} would see no gradient; with "
            'backend="reference", give it a forward hook that calls register_hook of what it gives'
        )
    if cell._forward_pre_hooks:
        raise UsageError(
            f"a forward pre-hook on an inner {type(cell).__name__}, as torch.nn.utils.prune registers, would "
            "run after its input weights were read; register it on the outer cell"
        )
    if torch.compiler.is_compiling():
        # The compiler then runs the pass uncompiled.
        raise UsageError(f"torch.compile does not trace a hook on an inner {type(cell).__name__}")
    cell.forward = method
    try:
        return cell(*arguments)
    finally:
        del cell.forward


@contextlib.contextmanager
def take_scaling(cells: Sequence[Cell]) -> Iterator[list[Tensor]]:
    """Collects the vectors by which hypernetworks scale recurrent matrices, on every backend.

    Args:
        cells: each runs one pass inside the ``with`` block. They are marked meanwhile, so no other thread may
            run them.

    Yields:
        a list. After the block it has a tensor [T, B, K, H] for each cell, without a gradient: d_h of a
        HyperLSTM's gates i, f, g, o or of a HyperRNN, z of a HyperRHN's layers, d of a ``hyper`` cell's
        matrices by blocks of H columns; of a HyperRNN of equation 2, z_h [T, B, 1, Z]. At padding they mean
        nothing.

    Raises:
        UsageError: a cell has no hypernetwork, or did not run.
    """
    vectors: list[Tensor] = []
    for cell in cells:
        cell.taken = []
    try:
        yield vectors
        for cell in cells:
            if not cell.taken:
                raise UsageError(f"{type(cell).__name__} has no hypernetwork, so nothing scales its matrices")
            vectors.append(torch.cat([taken.detach() for taken in cell.taken]).transpose(1, 2))
    finally:
        for cell in cells:
            # Code that torch.compile makes cannot delete it.
            cell.taken = None
