"""Buffers that the point-wise work of a time step reads and writes, the same for every implementation.

An operation (``lstm``, ``hyper_lstm``, ``highway``) allocates these for a whole sequence, runs the matrix
products itself and calls a point-wise implementation (``aten``, ``native``, ``triton``) once or twice a step.
One object holds the inputs and what the forward pass keeps, another the gradients of the backward pass.

Operands have the type of the activations (float32, float64, bfloat16, float16). States, gradients of states,
parameters of normalisation and sums have the state type: float64 for float64 operands, else float32.

Shapes: T time, B batch, H hidden, G gates times H, L layers of a time step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

UNSET: Any = None
"""Default of a tensor that only some networks have, and only these read."""


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of states and of all arithmetic for operands of a type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


AUTOCASTING = ("cpu", "cuda")
"""Types of devices on which autocast changes what these operations compute."""


def computed_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which operands of a type are multiplied; autocast leaves float64 as it is."""
    if dtype == torch.float64 or device.type not in AUTOCASTING or not torch.is_autocast_enabled(device.type):
        return dtype
    return torch.get_autocast_dtype(device.type)


@dataclass(frozen=True, kw_only=True)
class Gated:
    """A sequence of an LSTM, plain or with layer normalisation, alone or scaled by a hypernetwork.

    Attributes:
        u: [T, B, 4 H], whose rows may have gaps between them: sums of the gates i, f, g, o; with a
            hypernetwork h W_h.
        gx: x W_x [T, B, 4 H]. Without a hypernetwork u includes it, and only ``pointwise.many_steps``
            reads it.
        z: the embeddings [T, B, 12 Z] of the scaling vectors d_h, d_x and b, each for i, f, g, o. weight_d:
            maps z to these, [12, Z, H]; bias: added to b, [4, H]; state type. Only with a hypernetwork.
        gate_gain, gate_shift: [4 H]; c_gain, c_shift: [H], state type; None without normalisation.
        mask: [T, B], true at real positions. gal: scaled mask on the state that matrices read, [B, H].
        resets: [T, B], where the state starts anew, see ``sequence.Resets``.
        keep: [T or 1, B, H], kept units of the update.
        zone_h, zone_c: [T, B, H], units that keep their value; without them ``zone_h_rate`` and
            ``zone_c_rate`` are the share of the old value that is kept.
        share, c_scale: [T], state type: factors of the gradients of h through matrices, and through c.
        h0: [B, H]. c0: [B, H], state type. h: [T, B, H], the state after each step. c: the same, state type.
        y: [T, B, H], h with zeros at padding; None without a mask.
    """

    u: Tensor
    h0: Tensor
    c0: Tensor
    h: Tensor
    c: Tensor
    forget_bias: float
    epsilon: float
    gx: Tensor = UNSET
    z: Tensor = UNSET
    weight_d: Tensor = UNSET
    bias: Tensor = UNSET
    gate_gain: Tensor = UNSET
    gate_shift: Tensor = UNSET
    c_gain: Tensor = UNSET
    c_shift: Tensor = UNSET
    mask: Tensor | None = None
    gal: Tensor | None = None
    resets: Tensor | None = None
    keep: Tensor | None = None
    keep_scale: float = 1.0
    zone_h: Tensor | None = None
    zone_c: Tensor | None = None
    zone_h_rate: float = 0.0
    zone_c_rate: float = 0.0
    share: Tensor | None = None
    c_scale: Tensor | None = None
    y: Tensor = UNSET


@dataclass(frozen=True, kw_only=True)
class GatedGradients:
    """What the backward pass of a ``Gated`` reads and writes.

    Attributes:
        dy: gradient of the outputs [T, B, H] or None.
        dh: [B, H], the gradient of h that came through matrices. dh_direct: [B, H], state type, the rest of
            it, in and out; None if that is always zero. dc: [B, H], state type, in and out.
        du, dgx, dz: gradients of u, gx and z; du [K, B, 4 H], whose rows may have gaps, holds K steps, from a
            multiple of K on. dweight_d: [threads, 12, Z, H] and sums: [threads, 14 H], state
            type, gradients of weight_d and of gate_gain, gate_shift, bias, c_gain and c_shift, summed over
            rows and steps.
    """

    dy: Tensor | None
    dh: Tensor
    dc: Tensor
    du: Tensor
    sums: Tensor
    dh_direct: Tensor | None = None
    dgx: Tensor = UNSET
    dz: Tensor = UNSET
    dweight_d: Tensor = UNSET


@dataclass(frozen=True, kw_only=True)
class Highway:
    """A sequence of a recurrent highway network, plain or scaled by hypervectors; one layer is one step.

    Attributes:
        u: s W_l [L, T, B, 2 H]. gx: what layer 0 adds to it [T, B, 2 H]. z: [L, T, B, H] without its bias
            bias_z [L, H], state type; both None without a hypernetwork.
        bias: [L, 2 H], state type. bias_x: layer 0's second bias [2 H], state type, or None; it is None
            if ``gx`` includes it. first: [T, B], where layer 0 leaves ``bias`` out.
        mask: [T, B], true at real positions. gal: scaled mask on the state that matrices read, [B, H].
        resets: [T, B], where the state starts anew, see ``sequence.Resets``.
        keep: [T, B, L H], kept units of the transform gate. share: [T], state type: factors of the gradient
            of s through W_0.
        zone_h: [T, B, H], units of the time step's state that keep their value; without it ``zone_rate`` is
            the share of the old value that is kept.
        s0: [B, H], state type. s: [L, T, B, H], state type, the state after each layer. o: the same as
            operands; None if operands have the state type.
        y: outputs [T, B, H], or with ``trace`` the states after all layers, [T, B, L H]; zeros at padding.
    """

    u: Tensor
    gx: Tensor
    bias: Tensor
    s0: Tensor
    s: Tensor
    y: Tensor = UNSET
    o: Tensor | None = None
    z: Tensor = UNSET
    bias_x: Tensor | None = None
    bias_z: Tensor = UNSET
    first: Tensor | None = None
    mask: Tensor | None = None
    gal: Tensor | None = None
    resets: Tensor | None = None
    keep: Tensor | None = None
    keep_scale: float = 1.0
    zone_h: Tensor | None = None
    zone_rate: float = 0.0
    share: Tensor | None = None
    trace: float = 0.0

    @property
    def operands(self) -> Tensor:
        """The states after each layer in the type of the operands, [L, T, B, H]."""
        return self.s if self.o is None else self.o


@dataclass(frozen=True, kw_only=True)
class HighwayGradients:
    """What the backward pass of a ``Highway`` reads and writes.

    Attributes:
        dy: gradient of y or None. ds: [B, H], the gradient of a layer's output that came through the next
            matrix. ds_direct: [B, H], state type, the rest of it, in and out. past: [B, H], state type, the
            gradient that bypasses a time step.
        du, dgx, dz: gradients of u, gx and z; du [L, K, B, 2 H] and dz [L, K, B, H] hold K steps, from a
            multiple of K on. sums: [threads, (3 L + 2) H], state type, gradients
            of bias, bias_x and bias_z, summed over rows and steps.
    """

    dy: Tensor | None
    ds: Tensor
    ds_direct: Tensor
    past: Tensor
    du: Tensor
    dgx: Tensor
    sums: Tensor
    dz: Tensor = UNSET


Buffers = Gated | Highway
Gradients = GatedGradients | HighwayGradients
