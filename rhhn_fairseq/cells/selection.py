"""Which backend runs a cell: setting one, listing those that can, and the reason for the choice."""

import torch
from torch import nn

from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends
from rhhn_fairseq.ops.backends import Request
from rhhn_fairseq.ops.buffers import computed_dtype


def set_backend(module: nn.Module, name: str | None) -> None:
    """Makes every cell in ``module`` use one backend, whatever the environment says.

    ``reference`` runs each cell's ``step`` in plain torch operations. Second derivatives, ``torch.func``
    and forward hooks on a cell's inner modules need it.

    Args:
        module: a cell, a layer or any network with cells in it.
        name: one of ``rhhn_fairseq.ops.backends.NAMES``; None for the one in ``RHHN_KERNEL``, or else the
            fastest.

    Raises:
        UsageError: no backend has that name.
    """
    if name is not None and name not in backends.NAMES:
        raise UsageError(f"backend={name!r} is unknown, choose from {', '.join(backends.NAMES)}")
    for cell in module.modules():
        if isinstance(cell, Cell):
            cell.backend = name


def available_backends(
    cell: Cell, device="cpu", dtype: torch.dtype = torch.float32, padded: bool = False
) -> tuple[str, ...]:
    """Returns the names of the backends that can run a cell in its current mode, in order of preference.

    Args:
        device, dtype: of the input. padded: whether there is a mask.
    """
    request = _request_without_input(cell, 2, 1, torch.device(device), dtype)
    if padded:
        request = request._replace(extras=(*request.extras, "padding masks"))
    return backends.available(request)


def explain(
    cell: Cell, T: int, B: int, device="cpu", dtype: torch.dtype = torch.float32
) -> list[tuple[str, bool, str]]:
    """Explains which backend would run a cell in its current mode, and why the others would not.

    Args:
        T, B: steps and sequences. device, dtype: of the input.

    Returns:
        for each backend its name, whether it runs, and the reason in one line; see ``backends.explain``.
    """
    return backends.explain(_request_without_input(cell, T, B, torch.device(device), dtype))


def _request_without_input(cell: Cell, T: int, B: int, device: torch.device, dtype: torch.dtype) -> Request:
    """Returns the request of a hypothetical pass."""
    x_TBC = torch.empty(1, 1, cell.config.input_size, dtype=dtype).expand(T, B, -1)
    noise = cell.sample_noise(1, 1) if cell.training else None
    request = cell.request(x_TBC, cell.zero_state(B, dtype=dtype), None, noise)
    # Autocast is a setting of each device.
    dtype = computed_dtype(device, dtype)
    return request._replace(device=device, dtype=dtype, rounds=backends.rounding(device))
