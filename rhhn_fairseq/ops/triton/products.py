"""Which networks are small enough for kernels that multiply by themselves, and how those multiply."""

from typing import Any

import torch

from rhhn_fairseq.ops.gemm import matmul_precision
from rhhn_fairseq.ops.triton.tiles import power_of_two

WIDEST = 128
"""Units up to which a gate's matrix fits beside the rows in one multiprocessor."""

ROWS = 16
"""Sequences of a program: what the matrix units take at least."""

SHARED = 160 << 10
"""Bytes of shared memory that are taken for granted where no device says how many it has: an A100's."""


def multiplies(units: int, dtype: torch.dtype) -> bool:
    """Whether there are such kernels for a network of some units with operands of a type."""
    return units <= WIDEST and dtype in (torch.float32, torch.bfloat16, torch.float16)


def arguments(units: int, matrices: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What these kernels take: tiles, warps, stages, and how float32 is multiplied: as torch does it.

    Args:
        matrices: how many of [units, units] a step multiplies by.
    """
    cols = max(ROWS, power_of_two(units))
    precision = "ieee"
    if dtype == torch.float32:
        precision = "tf32x3" if matmul_precision(device.type) == "highest" else "tf32"
    # A loop reads the next step's matrices ahead where there is room for them, also transposed.
    stages = 2 if 2 * matrices * cols * cols * dtype.itemsize <= _shared(device) else 1
    warps = max(4, cols // 16)
    return {"ROWS": ROWS, "COLS": cols, "PRECISION": precision, "num_warps": warps, "num_stages": stages}


def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a program may take."""
    if device.type != "cuda":
        return SHARED
    # Older versions of torch do not say.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10)
