"""Calls of the Triton kernels that run a whole sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rhhn_fairseq.kernels.buffers import Highway
from rhhn_fairseq.kernels.triton import highway_sequence
from rhhn_fairseq.kernels.triton.products import ROWS, arguments, multiplies
from rhhn_fairseq.kernels.triton.steps import buffers_of, on_device


def highway(
    p: Highway, direction: str, weights: Sequence[Tensor], gal: Tensor | None, share: Tensor | None
) -> bool:
    """Runs all steps of a small highway network without z in one kernel; see ``native.whole``."""
    L, T, B, H = p.s.shape
    special = p.z is not None or p.first is not None or p.bias_x is not None
    if special or not multiplies(H, p.u.dtype):
        return False
    tensors = buffers_of(p, "u gx bias mask keep zone s0 s")
    if direction == "forward":
        kernel = highway_sequence.forward
        tensors |= buffers_of(p, "o y")
    else:
        kernel = highway_sequence.backward
        tensors |= buffers_of(p, "dy ds ds_direct du dgx") | {"share": share}
    with on_device(p.u.device):
        kernel[(-(-B // ROWS),)](
            **tensors,
            weights=torch.stack(list(weights)),
            gal=gal,
            T=T,
            B=B,
            H=H,
            L=L,
            LD_Y=L * H if p.trace else H,
            KEEP_SCALE=p.keep_scale,
            ZONE_RATE=p.zone_rate,
            **arguments(H, p.u.dtype, p.u.device),
        )
    if direction == "backward":
        # Every row takes every bias as it is, and gradients are zero at padding.
        p.sums[0, : 2 * L * H] = p.du.flatten(1, 2).sum(1, dtype=p.sums.dtype).flatten()
    return True
