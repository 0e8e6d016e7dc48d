"""Whole sequences of LSTM and LN LSTM as one differentiable operation, ``rhhn::lstm``.

A step is matrix products into buffers of the whole sequence, and one call of the point-wise work for each
network (``pointwise``). Forward keeps the products u and the states; backward computes the gates
from them again and leaves the gradients of u in a buffer, so that the gradient of a weight is one product
over all steps. All noise comes as masks from outside. The operation cannot be differentiated twice.

Shapes: T time, B batch, H hidden; gates i, f, g, o in every weight's columns.
"""

from dataclasses import astuple, dataclass
from typing import Sequence

import torch
from torch import Tensor

from rhhn_fairseq.cells.base import Noise, State, noise_at
from rhhn_fairseq.cells.lstm import LSTM, GatedConfig
from rhhn_fairseq.kernels import graphs, pointwise
from rhhn_fairseq.kernels.buffers import Gated, state_dtype
from rhhn_fairseq.kernels.matmul import Factor
from rhhn_fairseq.kernels.products import (
    before,
    gal_mask,
    gradient_share,
    noise_of,
    or_zeros,
    seen,
    through_recurrence,
    weight_gradient,
)
from rhhn_fairseq.layers.regularisation import LAYER_NORM_EPS

SUMS = 14
"""Gradients that the point-wise part adds up over rows, in units of H; see ``buffers.Gated.sums``."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of a pass, in the order in which operations take them as a list."""

    forget_bias: float
    keep_scale: float
    zone_h_rate: float
    zone_c_rate: float

    @staticmethod
    def of(config: GatedConfig) -> "Numbers":
        return Numbers(
            config.forget_bias, 1.0 / (1.0 - config.recurrent_dropout), config.zoneout, config.zoneout_c
        )


@dataclass(frozen=True)
class Randomness:
    """A pass's noise as operations take it; every field may be missing.

    Attributes:
        gal: scaled mask on the state, [B, H]. keep: [T or 1, B, H]. zone_h, zone_c: [T, B, H].
        h_share, c_share: [T], what gradients through h and c are multiplied by.
    """

    gal: Tensor | None = None
    keep: Tensor | None = None
    zone_h: Tensor | None = None
    zone_c: Tensor | None = None
    h_share: Tensor | None = None
    c_share: Tensor | None = None

    @staticmethod
    def of(noise: Noise | None, config: GatedConfig, g_TBG: Tensor) -> "Randomness":
        (T, B, _), H, dtype = g_TBG.shape, config.hidden_size, g_TBG.dtype
        keep = noise_at(noise, "update")
        return Randomness(
            gal_mask(noise, config.gal_dropout, B, H, dtype),
            keep if keep is None else noise_of(noise, "update", 1 if len(keep) == 1 else T, B, H),
            noise_of(noise, "zoneout", T, B, H),
            noise_of(noise, "zoneout_c", T, B, H),
            gradient_share(noise, "h_detach", T, state_dtype(dtype)),
            gradient_share(noise, "c_detach", T, state_dtype(dtype)),
        )

    def part(self, steps: slice) -> "Randomness":
        """That of some steps."""
        names = ("zone_h", "zone_c", "h_share", "c_share")
        found = {name: None if getattr(self, name) is None else getattr(self, name)[steps] for name in names}
        # One mask may serve all steps.
        keep = self.keep if self.keep is None or len(self.keep) == 1 else self.keep[steps]
        return Randomness(gal=self.gal, keep=keep, **found)

    def pointwise(self) -> dict[str, Tensor | None]:
        """The part that the point-wise work needs, as fields of ``buffers.Gated``."""
        return dict(keep=self.keep, zone_h=self.zone_h, zone_c=self.zone_c, c_scale=self.c_share)


def norm_fields(norm: Sequence[Tensor]) -> dict[str, Tensor]:
    """Fields of ``buffers.Gated`` from gate_gain, gate_shift, c_gain and c_shift; from nothing, nothing."""
    return dict(zip(("gate_gain", "gate_shift", "c_gain", "c_shift"), norm, strict=False))


@torch.library.custom_op("rhhn::lstm", mutates_args=())
@graphs.captured
def lstm(
    g: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight: Tensor,
    norm: Sequence[Tensor],
    mask: Tensor | None,
    gal: Tensor | None,
    keep: Tensor | None,
    zone_h: Tensor | None,
    zone_c: Tensor | None,
    h_share: Tensor | None,
    c_share: Tensor | None,
    numbers: Sequence[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """An LSTM over a sequence.

    Args:
        g: x W_x + b [T, B, 4 H]. h0: [B, H]. c0: [B, H], state type. weight: W_h [H, 4 H].
        norm: gate_gain, gate_shift [4 H], c_gain, c_shift [H] in the state type, or nothing.
        mask: [T, B]. gal ... c_share: see ``Randomness``. numbers: see ``Numbers``.
        backend: name of the point-wise implementation.

    Returns:
        outputs [T, B, H], last h and c; and for the backward u [T, B, 4 H], all c, and with a mask all h.
    """
    randomness = Randomness(gal, keep, zone_h, zone_c, h_share, c_share)
    (T, B, _), H = g.shape, h0.shape[-1]
    y, u = g.new_empty(T, B, H), torch.empty_like(g)
    h = y if mask is None else torch.empty_like(y)
    c = c0.new_empty(T, B, H)
    buffers = lstm_buffers(u, h0, c0, h, c, norm, mask, randomness, Numbers(*numbers))
    buffers.y, buffers.gx = None if mask is None else y, g
    if not pointwise.lstm_sequence(backend, buffers, "forward", weight, gal, None):
        step = pointwise.gated(backend, buffers, "forward")
        recurrent = Factor(weight, T, B, backend)
        for t, (g_t, u_t, h_t) in enumerate(zip(g.unbind(0), u.unbind(0), before(h0, h), strict=True)):
            recurrent.product(h_t if gal is None else h_t * gal, u_t, g_t)
            step(t)
    return y, h[-1].clone(), c[-1].clone(), u, c, (g.new_empty(0) if mask is None else h)


def lstm_buffers(u, h0, c0, h, c, norm, mask, randomness: Randomness, numbers: Numbers) -> Gated:
    """The buffers that forward and backward share; see ``buffers.Gated`` for the names."""
    return Gated(
        u=u,
        h0=h0,
        c0=c0,
        h=h,
        c=c,
        forget_bias=numbers.forget_bias,
        epsilon=LAYER_NORM_EPS,
        mask=mask,
        keep_scale=numbers.keep_scale,
        zone_h_rate=numbers.zone_h_rate,
        zone_c_rate=numbers.zone_c_rate,
        **norm_fields(norm),
        **randomness.pointwise(),
    )


@lstm.register_fake
def _(g, h0, c0, weight, norm, mask, gal, keep, zone_h, zone_c, h_share, c_share, numbers, backend):
    (T, B, _), H = g.shape, h0.shape[-1]
    y, c = g.new_empty(T, B, H), c0.new_empty(T, B, H)
    h = g.new_empty(0) if mask is None else torch.empty_like(y)
    return y, torch.empty_like(h0), torch.empty_like(c0), torch.empty_like(g), c, h


@torch.library.custom_op("rhhn::lstm_backward", mutates_args=())
@graphs.captured
def lstm_backward(
    dy: Tensor | None,
    dh_last: Tensor | None,
    dc_last: Tensor | None,
    u: Tensor,
    h: Tensor,
    c: Tensor,
    h0: Tensor,
    c0: Tensor,
    weight: Tensor,
    norm: Sequence[Tensor],
    mask: Tensor | None,
    gal: Tensor | None,
    keep: Tensor | None,
    zone_h: Tensor | None,
    zone_c: Tensor | None,
    h_share: Tensor | None,
    c_share: Tensor | None,
    numbers: Sequence[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of g, h0, c0, weight, and the sums [14 H] of ``buffers.Gated``, from those of the outputs."""
    randomness = Randomness(gal, keep, zone_h, zone_c, h_share, c_share)
    T, B, _ = c.shape
    buffers = lstm_buffers(u, h0, c0, h, c, norm, mask, randomness, Numbers(*numbers))
    add_gradients(buffers, dy, dh_last, dc_last, backend)
    buffers.du = torch.empty_like(u)
    if not pointwise.lstm_sequence(backend, buffers, "backward", weight, gal, h_share):
        step = pointwise.gated(backend, buffers, "backward")
        recurrent = Factor(weight, T, B, backend, transpose=True)
        du = buffers.du.unbind(0)
        for t in reversed(range(T)):
            step(t)
            recurrent.product(du[t], buffers.dh)
            through_recurrence(buffers.dh, gal, h_share, t)
    dweight = weight_gradient(seen(h0, h, gal), buffers.du, backend)
    return buffers.du, whole_dh(buffers), buffers.dc, dweight, buffers.sums.sum(0)


def add_gradients(buffers: Gated, dy, dh_last, dc_last, backend: str) -> None:
    """Gives the buffers of a forward pass what a backward pass of any kind reads and writes beside du."""
    zoned = buffers.zone_h is not None or buffers.zone_h_rate != 0.0
    buffers.dy = None if dy is None else dy.contiguous()
    buffers.dh = or_zeros(dh_last, buffers.h0)
    buffers.dc = or_zeros(dc_last, buffers.c0)
    if zoned or buffers.mask is not None:
        buffers.dh_direct = torch.zeros_like(buffers.c0)
    buffers.sums = pointwise.sums_of(backend, [SUMS * buffers.c0.shape[-1]], buffers.c0)


def hand_gradients(after: Gated, buffers: Gated) -> None:
    """Gives buffers of some steps the gradients that the steps after them have left, and the sums."""
    for name in ("dh", "dh_direct", "dc", "dweight_d", "sums"):
        setattr(buffers, name, getattr(after, name))


def whole_dh(buffers: Gated) -> Tensor:
    """After a backward pass, the gradient of h0."""
    return buffers.dh if buffers.dh_direct is None else buffers.dh + buffers.dh_direct.to(buffers.dh.dtype)


@lstm_backward.register_fake
def _(dy, dh_last, dc_last, u, h, c, h0, c0, weight, *_):
    sums = c0.new_empty(SUMS * h0.shape[-1])
    return torch.empty_like(u), torch.empty_like(h0), torch.empty_like(c0), torch.empty_like(weight), sums


def split_sums(sums: Tensor, H: int) -> tuple[Tensor, list[Tensor]]:
    """The gradient of the bias, and those of gate_gain, gate_shift, c_gain and c_shift."""
    gain, shift, bias, c_gain, c_shift = sums.split((4 * H, 4 * H, 4 * H, H, H))
    return bias, [gain, shift, c_gain, c_shift]


def _lstm_context(ctx, inputs, output):
    g, h0, c0, weight, norm, mask, *noise, numbers, backend = inputs
    y, _, _, u, c, h = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(u, c, h)
    ctx.save_for_backward(u, y if mask is None else h, c, h0, c0, weight, mask, *noise, *norm)
    ctx.rest = numbers, backend


def _lstm_gradients(ctx, dy, dh_last, dc_last, *_):
    u, h, c, h0, c0, weight, mask, *others = ctx.saved_tensors
    noise, norm = others[:6], others[6:]
    dg, dh0, dc0, dweight, sums = lstm_backward(
        dy, dh_last, dc_last, u, h, c, h0, c0, weight, norm, mask, *noise, *ctx.rest
    )
    dnorm = split_sums(sums, h0.shape[-1])[1] if norm else []
    return dg, dh0, dc0, dweight, dnorm, None, *(None,) * 6, None, None


lstm.register_autograd(_lstm_gradients, setup_context=_lstm_context)


def scan_lstm(
    cell: LSTM, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None, backend: str
) -> tuple[Tensor, State]:
    """``Cell.forward`` of an LSTM after its projection, by ``rhhn::lstm``."""
    (g_TBG,), (h0, c0), config = g, state, cell.config
    dtype = g_TBG.dtype
    y, h, c, *_ = lstm(
        g_TBG.contiguous(),
        h0.to(dtype),
        c0.to(state_dtype(dtype)),
        cell.weight_h.to(dtype),
        norm_of(cell, dtype),
        mask_TB,
        *fields_of(Randomness.of(noise, config, g_TBG)),
        list(astuple(Numbers.of(config))),
        backend,
    )
    return y, (h.to(h0.dtype), c.to(c0.dtype))


def fields_of(randomness: Randomness) -> tuple[Tensor | None, ...]:
    """The fields of the noise in their order."""
    return tuple(vars(randomness).values())


def norm_of(cell, dtype: torch.dtype) -> list[Tensor]:
    """A cell's parameters of layer normalisation, flat and in the state type; nothing without."""
    if not cell.config.layer_norm:
        return []
    parts = (cell.gate_gain, cell.gate_shift, cell.c_gain, cell.c_shift)
    return [part.reshape(-1).to(state_dtype(dtype)) for part in parts]
