"""Weights in 8-bit integers, for products on the CPU.

Each column of a weight has its own scale; the input rows are quantised at each product by their common
range. torch's library (FBGEMM, on ARM QNNPACK) multiplies the integers.

The integers of a weight end at 63, not at 127: processors without VNNI add two products in 16 bits, and the
largest such sum, 2 x 255 x 63 = 32,130, fits below 32,767.

Shapes: M rows, K inner width, N columns.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rhhn_fairseq.errors import UsageError

LARGEST = 63


@contextmanager
def quantised_tensors() -> Iterator[None]:
    """Makes quantised tensors without torch's warning: it plans to remove them, but torch 2.13 packs nothing
    else for the library."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation", category=UserWarning)
        yield


class QuantisedWeight(nn.Module):
    """A weight [K, N] in integers. It has no gradient; ``state_dict`` has its integers and scales.

    Args:
        weight_KN: float32, on the CPU.
    """

    def __init__(self, weight_KN: Tensor):
        super().__init__()
        self.shape = weight_KN.shape
        columns = weight_KN.detach().float().T.contiguous()
        # Symmetric: the largest magnitude of a column becomes LARGEST; a column of zeros gets scale 1.
        scales = columns.abs().amax(dim=1) / LARGEST
        scales = torch.where(scales > 0, scales, torch.ones_like(scales)).double()
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with quantised_tensors():
            integers = torch.quantize_per_channel(columns, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(integers, None)
        self._slices: dict[tuple[int, int], QuantisedWeight] = {}

    def get_extra_state(self) -> dict[str, Tensor]:
        """Returns the integers [N, K] and the scale of each column [N]."""
        integers, _ = torch.ops.quantized.linear_unpack(self.packed)
        return {"integers": integers.int_repr(), "scales": integers.q_per_channel_scales()}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Takes what ``get_extra_state`` returned; raises UsageError if the shape differs."""
        integers, scales = state["integers"], state["scales"]
        if integers.T.shape != self.shape:
            given, own = list(integers.T.shape), list(self.shape)
            raise UsageError(f"the state has a quantised weight of {given} in place of {own}")
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with quantised_tensors():
            weight = torch._make_per_channel_quantized_tensor(integers, scales, zeros, 0)
        self.packed = torch.ops.quantized.linear_prepack(weight, None)
        self._slices = {}

    def __getitem__(self, rows: slice) -> "QuantisedWeight":
        """Returns some rows of the weight, packed when they are first asked for."""
        start, stop, _ = rows.indices(self.shape[0])
        if (start, stop) not in self._slices:
            piece = copy.copy(self)
            piece.shape, piece._slices = torch.Size((stop - start, self.shape[1])), {}
            integers, _ = torch.ops.quantized.linear_unpack(self.packed)
            piece.packed = torch.ops.quantized.linear_prepack(integers[:, start:stop].contiguous(), None)
            self._slices[start, stop] = piece
        return self._slices[start, stop]

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, int8"

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight`` in float32; x is [..., K]. Raises UsageError if a gradient would be lost."""
        if x.requires_grad and torch.is_grad_enabled():
            raise UsageError("a quantised weight has no gradient; run it under torch.no_grad()")
        return torch.ops.quantized.linear_dynamic(x.float(), self.packed, reduce_range=False)
