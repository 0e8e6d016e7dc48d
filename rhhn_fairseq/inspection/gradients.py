"""Measures how the gradient of the last step's loss reaches the states of earlier steps.

Suarez 2017, sections 5.2 and 5.4, figures 4 to 6: outside the cell, the L2 norm of dLoss(last step)/d(state
of step t) over t; within the cell, the same by layer, averaged over time. A layer is a layer of a stack, or a
depth of a recurrent highway network.

In cells with the state (h, c), the gradient that reaches c_t has two parts (Kanuparthi et al. 2019; the
matrices A_t and B_t of Didolkar 2019, equation 8): one comes through c_{t+1}, the linear path in time, and
one through h_t, which passes through the weights. h-detach cuts the second part according to its coin.

Shapes: T steps, B lines, D entries of the dictionary, L layers.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.cells.lstm import GatedCell
from rhhn_fairseq.cells.nas import NAS
from rhhn_fairseq.cells.projected import ProjectedLSTM
from rhhn_fairseq.cells.rhn import RHN
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cells.selection import set_backend
from rhhn_fairseq.ops.loop import Noise, noise_at
from rhhn_fairseq.ops.regularise import zoneout


@dataclass(frozen=True)
class Flow:
    """The gradients of one model; norms are means over lines and over draws of h-detach's coins.

    Attributes:
        run: its name.
        norms: [T, L], of the gradient with respect to the state after step t in each layer.
        names: of the L layers.
        share_of_h: [T - 1], the share of the gradient that reaches c_t through h_t, not through c_{t+1}; a
            mean over layers, NaN where no gradient arrives. Empty for cells without c, and for those with
            ``zoneout_c``, whose h reads another c than the next step.
        initial: whether the model has its initial weights.
    """

    run: str
    norms: np.ndarray
    names: tuple[str, ...]
    share_of_h: np.ndarray
    initial: bool = False

    @property
    def outside(self) -> np.ndarray:
        """Returns the mean over layers, [T]."""
        return self.norms.mean(axis=1)

    @property
    def within(self) -> np.ndarray:
        """Returns the mean over time, [L]."""
        return self.norms.mean(axis=0)


def gradient_flow(
    model: nn.Module, tokens: Tensor, h_detach: float = 0.0, draws: int = 1, seed: int = 1
) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """Runs a character language model on lines from the zero state and backpropagates the last step's loss.

    A copy of the model computes in float64, in evaluation mode and without dropout. The gradient of one line
    does not depend on the others.

    Args:
        model: has ``embed``, ``stack`` and ``output``, as ``CharLM`` does.
        tokens: dictionary indices [T + 1, B]; the last row is only a target.
        h_detach: probability of h-detach's coin at each step. draws: number of draws of its coins.

    Returns:
        the norms [T, L], the layers' names, and the shares [T - 1], see ``Flow``.
    """
    model = copy.deepcopy(model).double().eval()
    # Recording replaces ``step``.
    set_backend(model, "reference")
    generator = torch.Generator().manual_seed(seed)
    norms, shares, names = [], [], ()
    for _ in range(draws if h_detach else 1):
        coins = torch.rand(len(tokens) - 1, generator=generator) < h_detach if h_detach else None
        drawn, share, names = _one_pass(model, tokens, coins)
        norms.append(drawn)
        shares.append(share)
    # Where the gradient is cut off in all layers and lines of a draw, its shares are undefined.
    with np.errstate(invalid="ignore"):
        known = np.isfinite(shares)
        mean = np.where(known, shares, 0.0).sum(axis=0) / known.sum(axis=0)
    return np.mean(norms, axis=0), names, mean


def _one_pass(model, tokens, coins) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    cells = list(model.stack.cells)
    widths = [len(cell.state_sizes) for cell in cells]
    state, steps, direct = None, [], []
    with recorded_layers(cells) as layers, torch.enable_grad():
        for t, row in enumerate(tokens[:-1]):
            coin: list[Noise] | None = (
                None if coins is None else [{"h_detach": coins[t].view(1, 1, 1)}] * len(cells)
            )
            y, state = model.stack(model.embed(row[None]), state, None, coin)
            steps.append([layer for taken in layers for layer in taken[-1]])
            totals = _memories(cells, widths, state)
            # The next step gets a separate node from the one that gave h, so each has its own gradient.
            state = tuple(tensor.view_as(tensor) for tensor in state)
            direct.append((totals, _memories(cells, widths, state)))
        loss = nn.functional.cross_entropy(model.output(y[-1]), tokens[-1], reduction="sum")
        wanted = [each for step in steps for each in step]
        wanted += [each for pair in direct for group in pair for each in group]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    filled = []
    for node, gradient in zip(wanted, gradients, strict=True):
        filled.append(torch.zeros_like(node) if gradient is None else gradient)
    count, T = len(steps[0]), len(steps)
    # Means over lines.
    norms = np.array([each.double().norm(dim=-1).mean().item() for each in filled[: T * count]])
    norms = norms.reshape(T, count)
    return norms, _shares(filled[T * count :], T), _names(cells, [len(taken[0]) for taken in layers])


def _memories(cells: Sequence[Cell], widths: Sequence[int], state) -> list[Tensor]:
    """Returns the tensors c of the layers that have one, which h and the next step read."""
    starts = np.cumsum([0, *widths[:-1]])
    pairs = zip(cells, starts, strict=True)
    return [
        state[start + 1]
        for cell, start in pairs
        if isinstance(cell, GatedCell | NAS | ProjectedLSTM) and not getattr(cell.config, "zoneout_c", 0.0)
    ]


def _shares(gradients: Sequence[Tensor], T: int) -> np.ndarray:
    """Returns shares through h [T - 1] from the gradients of c at each step: in total, and via the next c."""
    count = len(gradients) // (2 * T)
    if not count:
        return np.zeros(0)
    shares = []
    for t in range(T - 1):
        total = gradients[2 * count * t : 2 * count * t + count]
        through_c = gradients[2 * count * t + count : 2 * count * (t + 1)]
        pairs = zip(total, through_c, strict=True)
        lengths = [((both - c).double().norm(dim=-1), c.double().norm(dim=-1)) for both, c in pairs]
        values = torch.stack([h / (h + c) for h, c in lengths])
        shares.append(values.nanmean().item())
    return np.array(shares)


def _names(cells: Sequence[Cell], depths: Sequence[int]) -> tuple[str, ...]:
    names = []
    for number, depth in enumerate(depths, start=1):
        layer = f"{number}" if len(cells) > 1 or depth == 1 else ""
        names += [f"{layer}.{n}".lstrip(".") if depth > 1 else layer for n in range(1, depth + 1)]
    return tuple(names)


@contextmanager
def recorded_layers(cells: Sequence[Cell]) -> Iterator[list[list[list[Tensor]]]]:
    """Records for each cell and each step the states after the cell's layers.

    A recurrent highway network has one state per depth, any other cell only its output h. The cells must run
    their ``step``, which is replaced by one that computes the same.
    """
    taken: list[list[list[Tensor]]] = [[] for _ in cells]
    for cell, states in zip(cells, taken, strict=True):
        cell.step = _recording(cell, states)  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        for cell in cells:
            del cell.step


def _recording(cell: Cell, taken: list[list[Tensor]]):
    plain = type(cell).step

    def step(g_t, state, noise_t, **shared):
        if not isinstance(cell, (RHN, HyperRHN)):
            y, new = plain(cell, g_t, state, noise_t, **shared)
            taken.append([y])
            return y, new
        old = state[0]
        layers = cell.layers(g_t, old, noise_t)
        s = zoneout(old, layers[-1], cell.config.zoneout, noise_at(noise_t, "zoneout"))
        taken.append([*layers[:-1], s])
        return s, (s, *state[1:])

    return step


def gradient_arrays(flows: Sequence[Flow]) -> dict[str, np.ndarray]:
    """Returns the norms [T, L], the layers' names and the shares of each model."""
    arrays = {}
    for flow in flows:
        arrays[f"{flow.run}.norms"] = flow.norms
        arrays[f"{flow.run}.layers"] = np.array(flow.names)
        arrays[f"{flow.run}.share_of_h"] = flow.share_of_h
    return arrays
