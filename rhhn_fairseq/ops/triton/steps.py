"""Calls of the Triton kernels: turns the buffers of a sequence into the arguments of a step.

Nothing is read from the device, and all memory is allocated beforehand or by torch's allocator, so a CUDA
graph can capture the loop over a sequence.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import UNSET, Gated, GatedGradients, Highway, HighwayGradients
from rhhn_fairseq.ops.triton import Tile, gated_step, highway_step

KEPT_STEPS = 16
"""Steps whose gradients of d are kept, for one product that adds them to the gradient of weight_d."""


class GatedStep:
    """One step of ``buffers.Gated``; see there for the names.

    torch.bmm computes the scaling vectors d and their gradients, in the type of the operands.
    """

    def __init__(self, p: Gated, grads: GatedGradients | None):
        self.p, self.grads = p, grads
        B, H = p.c0.shape
        tile = Tile.of(B, H)
        self.d: Tensor = UNSET
        self.dd: Tensor = UNSET
        # The embeddings by kind, [T, 12, B, Z].
        self.z = None if p.z is None else p.z.unflatten(-1, (12, -1)).transpose(1, 2)
        if self.z is not None:
            self.weight_d = p.weight_d.to(p.u.dtype)
            self.d = p.u.new_empty(12, B, H)
            if grads is not None:
                self.dd = p.u.new_empty(12, KEPT_STEPS, B, H)
        self.guard = on_device(p.u.device)
        self.tensors = buffers_of(p, "u gx bias gate_gain gate_shift c_gain c_shift mask keep zone_h zone_c")
        self.numbers = dict(
            B=B,
            H=H,
            LD_U=_row_stride("u", p.u),
            FORGET_BIAS=p.forget_bias,
            EPSILON=p.epsilon,
            KEEP_SCALE=p.keep_scale,
            ZONE_H_RATE=p.zone_h_rate,
            ZONE_C_RATE=p.zone_c_rate,
            **tile.arguments,
        )
        if grads is None:
            self.kernel = gated_step.forward[(tile.blocks,)]
            self.tensors |= buffers_of(p, "h c y")
        else:
            self.numbers |= dict(LD_DU=_row_stride("du", grads.du), DD_STEPS=KEPT_STEPS)
            self.kernel = gated_step.backward[(tile.blocks,)]
            self.tensors |= buffers_of(p, "c_scale") | {"dd": self.dd}
            self.tensors |= buffers_of(grads, "dy dh dh_direct dc du dgx sums")

    def forward(self, t: int) -> None:
        p = self.p
        with self.guard:
            self._scale(t)
            self._launch(t, h_before=p.h if t else p.h0)

    def backward(self, t: int) -> None:
        assert self.grads is not None
        with self.guard:
            self._scale(t)
            self._launch(t, t_du=t % len(self.grads.du), t_dd=t % KEPT_STEPS)
            if self.z is not None:
                dz = self.grads.dz[t].unflatten(-1, (12, -1)).transpose(0, 1)
                torch.bmm(self.dd[:, t % KEPT_STEPS], self.weight_d.transpose(1, 2), out=dz)
                if t % KEPT_STEPS == 0:
                    self._add_to_weight(t, self.grads.dweight_d[0])

    def _scale(self, t: int) -> None:
        """Computes the scaling vectors of a step."""
        if self.z is not None:
            torch.bmm(self.z[t], self.weight_d, out=self.d)

    def _add_to_weight(self, t: int, dweight_d: Tensor) -> None:
        """Adds the gradients of d that are kept, of the steps from t on, to the gradient of weight_d."""
        steps = min(KEPT_STEPS, len(self.p.z) - t)
        z = self.p.z[t : t + steps].flatten(0, 1).unflatten(-1, (12, -1)).permute(1, 2, 0)
        dweight_d += torch.bmm(z, self.dd[:, :steps].flatten(1, 2))

    def _launch(self, t: int, **others: Tensor | int) -> None:
        p = self.p
        self.kernel(
            **self.tensors,
            **others,
            **self.numbers,
            d=self.d,
            c_before=p.c if t else p.c0,
            t=t,
            t_before=max(t - 1, 0),
            t_keep=t if p.keep is not None and len(p.keep) > 1 else 0,
        )


class HighwayStep:
    """One layer of ``buffers.Highway``; see there for the names."""

    def __init__(self, p: Highway, grads: HighwayGradients | None):
        self.p = p
        self.L, self.T, self.B, H = p.s.shape
        tile = Tile.of(self.B, H)
        self.guard = on_device(p.u.device)
        self.tensors = buffers_of(p, "u z bias bias_z mask keep zone_h")
        # Arguments that only layer 0 has, and those that only layers with an output have.
        self.of_first = buffers_of(p, "gx bias_x first")
        self.output = buffers_of(p, "y") if grads is None else buffers_of(grads, "dy")
        self.numbers = dict(
            T=self.T,
            B=self.B,
            H=H,
            L=self.L,
            LD_Y=self.L * H if p.trace else H,
            KEEP_SCALE=p.keep_scale,
            ZONE_RATE=p.zone_rate,
            **tile.arguments,
        )
        if grads is None:
            self.kernel = highway_step.forward[(tile.blocks,)]
            self.tensors |= buffers_of(p, "s o")
        else:
            self.kernel = highway_step.backward[(tile.blocks,)]
            self.numbers["D_STEPS"] = grads.du.shape[1]
            self.tensors |= buffers_of(grads, "ds ds_direct past du dz sums")
            self.of_first |= buffers_of(grads, "dgx")

    def forward(self, n: int) -> None:
        t, layer = divmod(n, self.L)
        s_start, start = self._start(t)
        self._launch(t, layer, s_start=s_start, start=start)

    def backward(self, n: int) -> None:
        self._launch(*divmod(n, self.L))

    def _start(self, t: int) -> tuple[Tensor, int]:
        """The tensor with the state at the start of a time step, and the index of its first row."""
        return (self.p.s, ((self.L - 1) * self.T + t - 1) * self.B) if t else (self.p.s0, 0)

    def _launch(self, t: int, layer: int, **start) -> None:
        last = layer == self.L - 1
        s_before, before = (self.p.s, ((layer - 1) * self.T + t) * self.B) if layer else self._start(t)
        with self.guard:
            self.kernel(
                **self.tensors,
                **(self.of_first if layer == 0 else dict.fromkeys(self.of_first)),
                **(self.output if last or self.p.trace else dict.fromkeys(self.output)),
                **start,
                **self.numbers,
                s_before=s_before,
                before=before,
                t=t,
                layer=layer,
                LAST=last,
            )


def buffers_of(p: Gated | Highway | GatedGradients | HighwayGradients, names: str) -> dict[str, Any]:
    """Returns buffers by name, as arguments of a kernel; masks as bytes.

    Raises:
        ValueError: a buffer is not contiguous.
    """
    buffers = {name: getattr(p, name) for name in names.split()}
    for name, tensor in buffers.items():
        if tensor is None:
            continue
        # Rows of an LSTM's u and du may have gaps between them; GatedStep checks these.
        if name not in ("u", "du") and not tensor.is_contiguous():
            raise ValueError(f"{name} of strides {tensor.stride()} cannot be given to a Triton kernel")
        if tensor.dtype == torch.bool:
            buffers[name] = tensor.view(torch.uint8)
    return buffers


def _row_stride(name: str, tensor: Tensor) -> int:
    """Returns the number of elements between the rows of u or du [T, B, G], which are evenly spaced."""
    T, B, _ = tensor.shape
    # A single row may have any stride.
    ld = tensor.stride(1 if B > 1 else 0)
    if tensor.stride(2) != 1 or (T > 1 and tensor.stride(0) != B * ld):
        raise ValueError(f"{name} of strides {tensor.stride()} cannot be given to a Triton kernel")
    return ld


def on_device(device: torch.device):
    """Makes a device the current one: kernels are launched on its current stream."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
