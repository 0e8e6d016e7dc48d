"""Running a cell over a sequence: the one visible choice of how.

Backends are registered by cell class and name. ``reference``, the loop over ``Cell.step``, serves every
cell. The environment variable ``RHHN_KERNEL`` forces one by name; what runs is logged once for every
cell class, device and dtype.
"""

import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Cell, Noise, State
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.kernels import graphs, lengths, pointwise, reference

logger = logging.getLogger(__name__)

STEP_ROWS = 32
"""Rows up to which a single step on the CPU is done sooner without a program: calling one costs more there.

Measured at 512 units with two threads: 0.7 to 1.0 times a program's time with 1 to 20 rows, 0.9 to 1.2 with
80 rows.
"""

_told: set[tuple] = set()


def fused(cell: Cell) -> Callable | None:
    """The whole-sequence program of a cell; None where there is only the loop over ``step``."""
    from rhhn_fairseq.kernels.programs import PROGRAMS

    return PROGRAMS.get(type(cell))


def backends(cell: Cell, device=None, dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """Names of the backends that can run ``cell`` on a device in a type, the preferred first."""
    if fused(cell) is None:
        return ("reference",)
    return (*pointwise.available(torch.device(device or "cpu"), dtype), "reference")


def whole(
    cell: Cell, x_TBC: Tensor, state: State, mask_TB: Tensor | None, noise: Noise | None
) -> tuple[Tensor, State] | None:
    """The pass of a plain LSTM or GRU by torch.nn or ``few_rows``, input projection and all; else None.

    They are for passes that ask for nothing more, where that ``pays`` and for single steps of few rows, and
    torch.nn wherever ``RHHN_KERNEL`` says so.

    Raises:
        UsageError: ``RHHN_KERNEL`` says so and torch.nn cannot make this pass.
    """
    from rhhn_fairseq.kernels import few_rows, torch_nn

    forced = os.environ.get("RHHN_KERNEL")
    small = not forced and _is_small(x_TBC, state)
    faster = not forced and (small or torch_nn.pays(cell, x_TBC.device, x_TBC.dtype))
    if forced != torch_nn.NAME and not faster:
        return None
    why = torch_nn.obstacle(cell, mask_TB, noise)
    if why is None:
        if small and few_rows.steps(cell, state):
            _tell(cell, x_TBC, "native, for single steps of few rows")
            return few_rows.lstm_step(cell, x_TBC, state)
        _tell(cell, x_TBC, f"{torch_nn.NAME}, for single steps of few rows" if small else torch_nn.NAME)
        single = len(x_TBC) == 1 and not torch.is_grad_enabled()
        return (torch_nn.step if single else torch_nn.run)(cell, x_TBC, state)
    if forced:
        raise UsageError(f"RHHN_KERNEL={forced}: {type(cell).__name__} cannot run there, {why}")
    return None


def _tell(cell: Cell, x: Tensor, name: str, more: str = "") -> None:
    """Says once which backend runs a class of cells on a device in a type, and what ``more`` there is."""
    key = (type(cell), x.device.type, x.dtype, name, more)
    if key not in _told:
        _told.add(key)
        logger.info("%s runs on the %s backend (%s, %s)%s", type(cell).__name__, name, *key[1:3], more)


def _beside_graphs(g: Tensor, name: str) -> str:
    """What a backend makes of a wish for CUDA graphs; nothing without one, or within a graph."""
    if not graphs.wanted():
        return ""
    if name == "reference":
        return ", without CUDA graphs, which this loop has none of"
    if graphs.possible([g]):
        return ", as CUDA graphs"
    return "" if g.is_cuda else ", without CUDA graphs, which need a GPU"


def _is_small(g: Tensor, state: State) -> bool:
    """Whether a pass is a step of decoding for few rows on the CPU; g is [T, B, ·].

    A state of a wider type, which ``recompute`` gives, would come back rounded from such a step.
    """
    T, B = g.shape[:2]
    if T != 1 or B > STEP_ROWS or g.device.type != "cpu" or torch.is_grad_enabled():
        return False
    return all(part.dtype == g.dtype for part in state) or torch.is_autocast_enabled("cpu")


def filled_up(
    cell: Cell, x_TBC: Tensor, first_TB1: Tensor | None, mask_TB: Tensor | None, noise: Noise | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Noise | None]:
    """The input of a pass, or the same with masked steps at its end that give it a length others have too.

    That is for passes that are recorded as CUDA graphs; see ``lengths``.
    """
    recorded = fused(cell) is not None and os.environ.get("RHHN_KERNEL") != "reference"
    if not recorded or not graphs.possible([x_TBC]) or lengths.stays(cell, len(x_TBC)):
        return x_TBC, first_TB1, mask_TB, noise
    return lengths.filled_up(x_TBC, first_TB1, mask_TB, noise)


def scan(
    cell: Cell, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None
) -> tuple[Tensor, State]:
    """Runs ``cell.step`` over the projection ``g`` by the preferred or the forced backend.

    Args: as ``Cell.forward``, after ``Cell.project`` and ``Cell.prepare``.

    Raises:
        UsageError: ``RHHN_KERNEL`` names a backend that cannot run this cell.
    """
    forced = os.environ.get("RHHN_KERNEL")
    if not forced and _is_small(g[0], state) and fused(cell) is not None:
        _tell(cell, g[0], "reference, for single steps of few rows")
        return reference.scan(cell, g, state, mask_TB, noise)
    available = backends(cell, g[0].device, g[0].dtype)
    name = forced or available[0]
    if name not in available:
        why = fused(cell) and pointwise.obstacle(name, g[0].device)
        raise UsageError(
            f"RHHN_KERNEL={name}: {type(cell).__name__} runs on {', '.join(available)} only"
            + (f"; {why}" if why else "")
        )
    _tell(cell, g[0], name, _beside_graphs(g[0], name))
    if name == "reference":
        return reference.scan(cell, g, state, mask_TB, noise)
    # Programs give addresses away, so that whatever may be a view is laid out in rows first; g by the program
    # itself, which may want another order of it.
    state = tuple(part.contiguous() for part in state)
    mask_TB = None if mask_TB is None else mask_TB.contiguous()
    noise = None if noise is None else {key: part.contiguous() for key, part in noise.items()}
    return fused(cell)(cell, g, state, mask_TB, noise, name)
