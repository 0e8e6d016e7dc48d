"""How float32 matrices are multiplied: in full, or with operands rounded for the matrix units."""

import logging
import os

import torch

from rhhn_fairseq.errors import UsageError

logger = logging.getLogger(__name__)

VARIABLE = "RHHN_MATMUL_PRECISION"
PRECISIONS = ("highest", "high", "medium")


def matmul_precision(device_type: str) -> str:
    """How torch multiplies float32 matrices on a type of device: one of ``PRECISIONS``."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # Set by torch's newer settings, one for each library, which the older function will not speak for.
        library = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
        return {"tf32": "high", "bf16": "medium"}.get(library.matmul.fp32_precision, "highest")


def set_matmul_precision() -> None:
    """Sets torch's precision of float32 matrix products to what RHHN_MATMUL_PRECISION says; logged.

    ``medium`` rounds operands to bfloat16 inside the product (TF32 at least on a GPU); sums, results and
    everything between the products stay float32. CPUs with AMX are several times faster then. Unset, torch's
    own setting stays, which is full float32.

    Raises:
        UsageError: the variable holds another word.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return
    if value not in PRECISIONS:
        raise UsageError(f"{VARIABLE}={value} is unknown, choose from {', '.join(PRECISIONS)}")
    torch.set_float32_matmul_precision(value)
    logger.info("float32 matrix products have the precision %r (%s)", value, VARIABLE)
