"""Measures how much the weights that a hypernetwork generates change from one step to the next.

Ha, Dai, Le 2016 (arXiv 1609.09106), figure 4: the L2 norm of the change of each generated recurrent matrix. A
matrix W scaled by d_t changes by ``norm(W * (d_t - d_{t-1}))``. Its square is the sum over columns of the
squared column norm times the squared change of the column's factor, so no matrix is materialised. With a
``hyper_rank`` above 1 every element of a matrix has its own factor.

Shapes: B lines, N matrices of a layer, M of all layers, F factors of a matrix, Z embedding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.hyper import Hyper
from rhhn_fairseq.cells.hyper_lstm import HyperLSTM
from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.cells.hyper_rnn import FullHyperRNN, PracticalHyperRNN
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.layers.window import WindowStack
from rhhn_fairseq.ops.loop import State


@dataclass(frozen=True)
class Generated:
    """The recurrent matrices that a cell's hypernetwork scales.

    Attributes:
        names: of the N matrices, in the papers' notation.
        sizes: norms [N, F] of what each factor scales.
        factors: maps the cell's state to the factors [N, B, F], without their constant part.
        late: whether a step takes its factors from the state before it, not from the state after it.
    """

    names: tuple[str, ...]
    sizes: Tensor
    factors: Callable[[State], Tensor]
    late: bool = False


@dataclass(frozen=True)
class Watched:
    """A layer whose weights change: its matrices, and which tensors of the stack's state are its own."""

    names: tuple[str, ...]
    matrices: Generated
    columns: slice

    def factors(self, before: State, after: State) -> Tensor:
        """Returns the factors [N, B, F] in the step between two states of the stack."""
        return self.matrices.factors((before if self.matrices.late else after)[self.columns])


def watch(stack: nn.Module) -> list[Watched]:
    """Returns the layers of a ``Stack`` or ``WindowStack`` whose weights change; of an RHN its last depth."""
    if isinstance(stack, WindowStack):
        layers = [stack.first, *(stack.upper.cells if stack.upper else ())]
        cells = [stack.first.cell, *layers[1:]]
    else:
        layers = cells = list(stack.cells)
    watched, start = [], 0
    for number, (layer, cell) in enumerate(zip(layers, cells, strict=True), start=1):
        matrices = generated(cell)
        if matrices is not None:
            prefix = f"{number} " if len(cells) > 1 else ""
            names = tuple(prefix + name for name in matrices.names)
            watched.append(Watched(names, matrices, slice(start, start + len(cell.state_sizes))))
        start += len(layer.state_sizes)
    return watched


def generated(cell: Cell, layer: int = -1) -> Generated | None:
    """Returns the matrices of a cell that change; None if none does.

    Args:
        layer: for a HyperRHN, the layer whose state determines the factors; by default the last, whose state
            the cell's state contains.
    """
    if isinstance(cell, HyperRHN):
        if cell.config.hyper_rank > 1:
            sizes = _numbers(cell.weight_s[layer], 2)
            return Generated(
                ("h", "t"), sizes, lambda state: _factors(cell.scaling_matrices(state[1], layer))
            )
        sizes = cell.weight_s[layer].detach().norm(dim=0).view(2, -1)
        # One hypervector scales the halves h and t of a matrix.
        return Generated(("h", "t"), sizes, lambda state: (state[1] @ cell.weight_z[layer]).expand(2, -1, -1))
    if isinstance(cell, Hyper) and cell.config.hyper_output == "last":
        sizes, names = [], []
        for name, weight in cell.main.state_matrices().items():
            sizes.append(weight.detach().norm(dim=0).view(-1, cell.config.hidden_size))
            gates = len(sizes[-1])
            names += [name] if gates == 1 else [f"{name} {gate}" for gate in range(1, gates + 1)]
        return Generated(tuple(names), torch.cat(sizes), cell.scaling_vectors)
    late = getattr(cell.config, "hyper_state", None) == "previous"
    if isinstance(cell, HyperLSTM):
        gates = ("i", "f", "g", "o")
        if cell.config.hyper_rank > 1:
            sizes = _numbers(cell.weight_h, 4)
            return Generated(gates, sizes, lambda state: _factors(cell.scaling_matrices(state[2])), late)
        sizes = cell.weight_h.detach().norm(dim=0).view(4, -1)
        return Generated(gates, sizes, lambda state: cell.scaling(state[2])[0], late)
    if isinstance(cell, PracticalHyperRNN):
        sizes = cell.weight_h.detach().norm(dim=0)[None]
        return Generated(("W",), sizes, lambda state: cell.scaling(state[1])[0], late)
    if isinstance(cell, FullHyperRNN):
        mixing = _mixing(cell.weight_h.detach())
        sizes = mixing.new_ones(1, len(mixing))
        return Generated(("W",), sizes, lambda state: (state[1] @ cell.weight_zh @ mixing)[None], late)
    return None


def _numbers(weight_HG: Tensor, blocks: int) -> Tensor:
    """Returns the elements of a weight by block of columns, [blocks, F]."""
    return weight_HG.detach().unflatten(1, (blocks, -1)).transpose(0, 1).flatten(1)


def _factors(scale_BHNK: Tensor) -> Tensor:
    """Returns the factors of the elements of N matrices, [N, B, F]."""
    return scale_BHNK.permute(2, 0, 1, 3).flatten(2)


def _mixing(weight_HZH: Tensor) -> Tensor:
    """Returns a matrix [Z, Z] that maps z to a vector whose norm is that of the sum of z_k W_k."""
    flat = weight_HZH.transpose(0, 1).flatten(1).double()
    values, vectors = torch.linalg.eigh(flat @ flat.T)
    return (vectors * values.clamp(min=0).sqrt()).to(weight_HZH.dtype)


def step_changes(watched: Sequence[Watched], now: Sequence[Tensor], before: Sequence[Tensor]) -> np.ndarray:
    """Returns norms [M] of the changes of one line's matrices, from the factors of this and the last step."""
    norms = [
        ((new - old)[:, 0] * layer.matrices.sizes).norm(dim=-1)
        for layer, new, old in zip(watched, now, before, strict=True)
    ]
    return torch.cat(norms).double().numpy() if norms else np.zeros(0)
