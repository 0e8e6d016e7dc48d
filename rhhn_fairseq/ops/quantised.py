"""Weights in 8-bit integers, for products on the CPU.

Each column of a weight has a scale of its own; the rows it meets are quantised at each product by their own
range. torch's library (FBGEMM, on ARM QNNPACK) multiplies the integers.

Shapes: M rows, K inner width, N columns.
"""

import warnings

import torch
from torch import Tensor, nn

from rhhn_fairseq.errors import UsageError


class QuantisedWeight(nn.Module):
    """A weight [K, N] in integers. It has no gradient, and no entries in ``state_dict``.

    Args:
        weight_KN: float32, on the CPU.
    """

    def __init__(self, weight_KN: Tensor):
        super().__init__()
        self.shape = weight_KN.shape
        columns = weight_KN.detach().float().T.contiguous()
        # Symmetric, 127 steps to the largest number of a column; a column of zeros keeps scale 1.
        scales = columns.abs().amax(dim=1) / 127
        scales = torch.where(scales > 0, scales, torch.ones_like(scales)).double()
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            # torch means to drop tensors of integers, but torch 2.13 packs nothing else for the library.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation", category=UserWarning)
            integers = torch.quantize_per_channel(columns, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(integers, None)

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, int8"

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight`` in float32; x is [..., K]. Raises UsageError where a gradient would be lost."""
        if x.requires_grad and torch.is_grad_enabled():
            raise UsageError("a quantised weight has no gradient; run it under torch.no_grad()")
        return torch.ops.quantized.linear_dynamic(x.float(), self.packed, reduce_range=False)
