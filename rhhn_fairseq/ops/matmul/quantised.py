"""Weights in 8-bit integers, for products on the CPU.

Each column of a weight has its own scale. Each input row is rounded to 8 bits at its product, by its own
range, so the result of a row does not depend on the others.

The integers of a weight end at 63, not at 127: processors without VNNI add two products in 16 bits, and the
largest such sum, 2 x 255 x 63 = 32,130, fits below 32,767.

Shapes: M rows, K inner width, N columns.
"""

import torch
from torch import Tensor, nn

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import native

LARGEST = 63


class QuantisedWeight(nn.Module):
    """A weight [K, N] in integers. It has no gradient; ``state_dict`` has its integers and scales.

    Args:
        weight_KN: float32, on the CPU.
    """

    def __init__(self, weight_KN: Tensor):
        super().__init__()
        self.shape = weight_KN.shape
        columns = weight_KN.detach().float().T
        # Symmetric: the largest magnitude of a column becomes LARGEST; a column of zeros gets scale 1.
        scales = columns.abs().amax(dim=1) / LARGEST
        scales = torch.where(scales == 0, 1.0, scales)
        self._set((columns / scales.unsqueeze(1)).round().to(torch.int8), scales)

    def _set(self, integers_NK: Tensor, scales_N: Tensor) -> None:
        self.scales, self.panels = scales_N.float(), native.lay_integers(integers_NK)
        self.sums = integers_NK.sum(1, dtype=torch.int32)
        self._slices: dict[tuple[int, int], QuantisedWeight] = {}

    def _integers(self) -> Tensor:
        """Returns the integers [N, K]."""
        return native.collect_integers(self.panels, self.shape[1], self.shape[0])

    def get_extra_state(self) -> dict[str, Tensor]:
        """Returns the integers [N, K] and the scale of each column [N]."""
        return {"integers": self._integers(), "scales": self.scales}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Takes what ``get_extra_state`` returned; raises UsageError if the shape differs."""
        if state["integers"].T.shape != self.shape:
            given, own = list(state["integers"].T.shape), list(self.shape)
            raise UsageError(f"the state has a quantised weight of {given} in place of {own}")
        self._set(state["integers"], state["scales"])

    def __getitem__(self, rows: slice) -> "QuantisedWeight":
        """Returns some rows of the weight, packed when they are first asked for."""
        start, stop, _ = rows.indices(self.shape[0])
        if (start, stop) not in self._slices:
            piece = QuantisedWeight(torch.empty(stop - start, self.shape[1]))
            piece._set(self._integers()[:, start:stop], self.scales)
            self._slices[start, stop] = piece
        return self._slices[start, stop]

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, {self.shape[1]}, int8"

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight`` in float32; x is [..., K]. Raises UsageError if a gradient would be lost."""
        if x.requires_grad and torch.is_grad_enabled():
            raise UsageError("a quantised weight has no gradient; run it under torch.no_grad()")
        x_MK = x.float().reshape(-1, self.shape[0]).contiguous()
        multiply = native.multiply_integers if native.IS_BUILT else _multiply
        return multiply(x_MK, self.panels, self.scales, self.sums).unflatten(0, x.shape[:-1])


def _multiply(x_MK: Tensor, panels: Tensor, scales_N: Tensor, sums_N: Tensor) -> Tensor:
    """Does what the compiled function does, where it was not built."""
    low, high = x_MK.amin(1, keepdim=True).clamp(max=0), x_MK.amax(1, keepdim=True).clamp(min=0)
    scale = torch.where(high > low, (high - low) / 255, 1.0)
    zero = (0.5 - low / scale).floor()
    rounded = ((x_MK / scale + zero).clamp(0, 255) + 0.5).floor()
    integers_NK = native.collect_integers(panels, len(scales_N), x_MK.shape[1])
    return scale * scales_N * (rounded @ integers_NK.T.float() - zero * sums_N)
