"""Kernels that include matrix products: which networks are small enough, and the kernels' options."""

from typing import Any

import torch

from rhhn_fairseq.ops.gemm import matmul_precision
from rhhn_fairseq.ops.triton.tiles import power_of_two

WIDEST = 128
"""The most units with which a gate's matrix and the rows fit into one multiprocessor."""

ROWS = 16
"""Sequences of a program: the fewest that matrix units accept."""

SHARED = 160 << 10
"""Bytes of shared memory assumed without a device: an A100's."""


def multiplies(units: int, dtype: torch.dtype) -> bool:
    """Whether such kernels exist for a network of this many units with operands of this type."""
    return units <= WIDEST and dtype in (torch.float32, torch.bfloat16, torch.float16)


def arguments(units: int, matrices: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Returns tile sizes, warps, stages and the precision of float32 products, which is that of torch.

    Args:
        matrices: the number of matrices [units, units] that a step multiplies by.
    """
    cols = max(ROWS, power_of_two(units))
    precision = "ieee"
    if dtype == torch.float32:
        precision = "tf32x3" if matmul_precision(device.type) == "highest" else "tf32"
    # Two stages load the next step's matrices ahead, if shared memory has room for them and their transposes.
    stages = 2 if 2 * matrices * cols * cols * dtype.itemsize <= _shared(device) else 1
    warps = max(4, cols // 16)
    return {"ROWS": ROWS, "COLS": cols, "PRECISION": precision, "num_warps": warps, "num_stages": stages}


def _shared(device: torch.device) -> int:
    """Bytes of shared memory that a program may take."""
    if device.type != "cuda":
        return SHARED
    # Older versions of torch lack this property.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 << 10)
