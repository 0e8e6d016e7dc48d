"""Calls of the Triton kernels that run a whole sequence."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import Gated, Highway
from rhhn_fairseq.ops.triton import highway_sequence, lstm_sequence
from rhhn_fairseq.ops.triton.products import ROWS, arguments, multiplies
from rhhn_fairseq.ops.triton.steps import buffers_of, on_device


def highway(
    p: Highway, direction: str, weights: Sequence[Tensor], gal: Tensor | None, share: Tensor | None
) -> Callable[[int, int], None] | None:
    """Returns a function that runs steps of a small highway without z; see ``native.highway_steps``."""
    L, T, B, H = p.s.shape
    special = p.z is not None or p.first is not None or p.bias_x is not None
    if special or not multiplies(H, p.u.dtype):
        return None
    tensors = buffers_of(p, "u gx bias mask keep zone s0 s")
    if direction == "forward":
        kernel = highway_sequence.forward
        tensors |= buffers_of(p, "o y")
    else:
        kernel = highway_sequence.backward
        tensors |= buffers_of(p, "dy ds ds_direct du dgx") | dict(share=share, D=p.du.shape[1])
    values = dict(
        weights=torch.stack(list(weights)),
        gal=gal,
        T=T,
        B=B,
        H=H,
        L=L,
        LD_Y=L * H if p.trace else H,
        KEEP_SCALE=p.keep_scale,
        ZONE_RATE=p.zone_rate,
        **arguments(H, 2, p.u.dtype, p.u.device),
    )

    def run(start: int, stop: int) -> None:
        with on_device(p.u.device):
            kernel[(-(-B // ROWS),)](**tensors, **values, START=start, STOP=stop)
        if direction == "backward":
            # Every row takes every bias unscaled, and gradients are zero at padding.
            du = p.du[:, start % p.du.shape[1] :][:, : stop - start]
            p.sums[0, : 2 * L * H] += du.flatten(1, 2).sum(1, dtype=p.sums.dtype).flatten()

    return run


def lstm(p: Gated, direction: str, weight: Tensor, gal: Tensor | None, share: Tensor | None) -> bool:
    """Runs all steps of a small LSTM in one kernel; False if it is too large; see ``triton.run_lstm``."""
    T, B, H = p.c.shape
    if p.weight_d is not None or not multiplies(H, p.u.dtype):
        return False
    blocks = -(-B // ROWS)
    tensors = buffers_of(p, "u gate_gain gate_shift c_gain c_shift mask keep zone_h zone_c c0 c")
    if direction == "forward":
        kernel = lstm_sequence.forward
        tensors |= buffers_of(p, "gx h0 h y")
    else:
        kernel = lstm_sequence.backward
        # One slot for each of these programs.
        p.sums = p.sums.new_zeros(blocks, p.sums.shape[1])
        tensors |= buffers_of(p, "c_scale dy dh dh_direct dc du sums") | {"share": share}
    with on_device(p.u.device):
        kernel[(blocks,)](
            **tensors,
            weight=weight.contiguous(),
            gal=gal,
            T=T,
            B=B,
            H=H,
            KEEP_T=int(p.keep is not None and len(p.keep) > 1),
            FORGET_BIAS=p.forget_bias,
            EPSILON=p.epsilon,
            KEEP_SCALE=p.keep_scale,
            ZONE_H_RATE=p.zone_h_rate,
            ZONE_C_RATE=p.zone_c_rate,
            **arguments(H, 4, p.u.dtype, p.u.device),
        )
    return True
