"""Point-wise work of a time step in torch operations, for every device and where C++ is not built.

Gates are kept gate-major, [4, B, H], so that each is one contiguous block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import Buffers, Gated, Gradients, Highway


def step(p: Buffers, grads: Gradients | None) -> Callable[[int], None]:
    """Returns a function that runs one step of a sequence, or of a highway one layer; backward with
    gradients."""
    kind: Any = _GatedStep if isinstance(p, Gated) else _HighwayStep
    steps = kind(p, grads)
    return steps.forward if grads is None else steps.backward


class _GatedStep:
    """One step of ``buffers.Gated``; see there for the names, and cells/lstm.py for the equations.

    With a hypernetwork, weight_d gets one more row, which multiplies a column of ones appended to z. It holds
    the bias of b, and zeros for d_h and d_x. Bias and gradient then come out of products computed anyway.
    """

    def __init__(self, p: Gated, grads: Any):
        self.p, self.grads = p, grads
        self.dtype = p.c.dtype
        (_, B, H), new = p.c.shape, p.c.new_empty
        self.inner = new(B, H)
        self.a: Tensor
        self.da: Tensor
        if p.weight_d is None:
            self.a, self.da = new(4, B, H), new(4, B, H)
        else:
            # b enters the sums unscaled: they are computed in its memory, and its gradient is theirs. Another
            # row of weight_d multiplies a column of ones appended to z.
            self.d, self.dd = new(12, B, H), new(12, B, H)
            self.a, self.da = self.d[8:], self.dd[8:]
            self.weight = torch.nn.functional.pad(p.weight_d, (0, 0, 0, 1))
            self.weight[8:, -1] = p.bias
            self.dweight = torch.zeros_like(self.weight)
            self.z = new(12, B, self.weight.shape[1]).fill_(1.0)
        self.normalised = p.gate_gain is not None
        if self.normalised:
            self.gains, self.shifts = p.gate_gain.view(4, 1, H), p.gate_shift.view(4, 1, H).clone()
            self.shifts[1] += p.forget_bias

    def forward(self, t: int) -> None:
        p = self.p
        h_old, c_old = self._before(t)
        (i, f, g, o), _ = self._gates(t)
        # Without a mask or zoneout, c and h are computed directly in their buffers.
        c_ends = p.mask is None and p.zone_c is None and not p.zone_c_rate
        h_ends = p.mask is None and p.zone_h is None and not p.zone_h_rate
        c = torch.mul(f, c_old, out=p.c[t] if c_ends else None).addcmul_(i, self._keep(g, t))
        inner = c
        if p.c_gain is not None:
            inner, _ = _normalise(c, p.c_gain, p.c_shift, p.epsilon)
        inner = torch.tanh(inner, out=self.inner)
        h = torch.mul(o, inner, out=p.h[t] if h_ends else o)
        h = zone(h_old, h, p.zone_h, t, p.zone_h_rate)
        c = zone(c_old, c, p.zone_c, t, p.zone_c_rate)
        if p.mask is None:
            if not h_ends:
                p.h[t].copy_(h)
            if not c_ends:
                p.c[t].copy_(c)
            return
        here = p.mask[t].bool().unsqueeze(-1)
        torch.where(here, h.to(h_old.dtype), h_old, out=p.h[t])
        torch.where(here, c, c_old, out=p.c[t])
        # Not a product: a NaN times zero is NaN.
        p.y[t].copy_(p.h[t].masked_fill(~here, 0.0))

    def backward(self, t: int) -> None:
        p, grads, da = self.p, self.grads, self.da
        _, c_old = self._before(t)
        (i, f, g, o), norms = self._gates(t)
        d_i, d_f, d_g, d_o = da
        update = self._keep(g, t)
        inner = torch.mul(f, c_old, out=self.inner).addcmul_(i, update)
        if p.c_gain is not None:
            inner, c_norm = _normalise(inner, p.c_gain, p.c_shift, p.epsilon)
        inner = torch.tanh(inner, out=inner)

        dh, dc = self._arriving(t), grads.dc
        here = None
        if p.mask is not None:
            # No gradient arrives at padding, so all that is computed from it is zero there.
            here = p.mask[t].bool().unsqueeze(-1)
            dh, dc = dh.masked_fill(~here, 0.0), dc.masked_fill(~here, 0.0)
        stays = share(p.zone_c, t, p.zone_c_rate, self.dtype)
        sigmoid_backward(torch.mul(dh, inner, out=d_o), o)
        dc_new = tanh_backward(dh.mul_(o), inner)
        if p.c_gain is not None:
            dc_new, *sums = _normalise_backward(dc_new, self.inner, c_norm, p.c_gain, p.c_shift)
            self._add(12, torch.stack(sums))
        dc_new.add_(dc if p.zone_c is None and not p.zone_c_rate else dc * (1 - stays))
        sigmoid_backward(torch.mul(dc_new, c_old, out=d_f), f)
        sigmoid_backward(torch.mul(dc_new, update, out=d_i), i)
        tanh_backward(self._keep_(torch.mul(dc_new, i, out=d_g), t), g)
        zoned = p.zone_c is not None or p.zone_c_rate
        # Without a mask or zoneout, the gradient is computed directly in its buffer.
        through = torch.mul(dc_new, f, out=grads.dc if here is None and not zoned else dc_new)
        if p.c_scale is not None:
            through.mul_(p.c_scale[t])
        if zoned:
            through.add_(dc * stays)
        if here is not None:
            torch.where(here, through, grads.dc, out=grads.dc)
        elif zoned:
            grads.dc.copy_(through)
        if norms is not None:
            da = self._gates_backward(da, norms)
        self._spread(t, da)

    def _before(self, t: int) -> tuple[Tensor, Tensor]:
        """h and c before step t."""
        return (self.p.h[t - 1], self.p.c[t - 1]) if t else (self.p.h0, self.p.c0)

    def _gates(self, t: int) -> tuple[Tensor, tuple | None]:
        """Returns i, f, g, o [4, B, H], and what the backward of their normalisation needs."""
        p, a = self.p, self.a
        u = _by_block(p.u[t])
        if p.weight_d is None:
            a.copy_(u)
        else:
            self.z[..., :-1].copy_(_by_block(p.z[t], 12))
            torch.bmm(self.z, self.weight, out=self.d)
            d_h, d_x, _ = self.d.chunk(3)
            a.addcmul_(d_x, _by_block(p.gx[t]).to(self.dtype)).addcmul_(d_h, u.to(self.dtype))
        gates, norms = a, None
        if not self.normalised:
            a[1].add_(p.forget_bias)
        else:
            norms = _normalise(a, None, None, p.epsilon)
            gates = torch.addcmul(self.shifts, norms[0], self.gains)
        gates[:2].sigmoid_()
        gates[2].tanh_()
        gates[3].sigmoid_()
        return gates, norms

    def _gates_backward(self, da: Tensor, norms: tuple) -> Tensor:
        """Turns the gradient of the normalised gates into that of their sums, [4, B, H]."""
        normal, statistics = norms
        self._add(0, (da * normal).sum(1))
        self._add(4, da.sum(1))
        da.mul_(self.gains)
        return da.copy_(_normalise_backward(da, self.a, statistics, None, None)[0])

    def _keep(self, update: Tensor, t: int) -> Tensor:
        return update if self.p.keep is None else self._keep_(update.clone(), t)

    def _keep_(self, update: Tensor, t: int) -> Tensor:
        """Applies recurrent dropout in place."""
        keep = self.p.keep
        if keep is None:
            return update
        return update.mul_(keep[t if len(keep) > 1 else 0]).mul_(self.p.keep_scale)

    def _arriving(self, t: int) -> Tensor:
        """Returns the gradient of the new h, free to modify; stores in dh_direct what bypasses the step."""
        p, grads = self.p, self.grads
        through = grads.dh.to(self.dtype)
        dh = through.clone() if grads.dy is None else through + grads.dy[t]
        if grads.dh_direct is None:
            return dh
        stays = share(p.zone_h, t, p.zone_h_rate, self.dtype)
        everything = dh + grads.dh_direct
        past = everything * stays
        if p.mask is not None:
            # Padding has no output, so dy does not count there.
            past = torch.where(p.mask[t].bool().unsqueeze(-1), past, through + grads.dh_direct)
        grads.dh_direct.copy_(past)
        return everything * (1 - stays)

    def _add(self, row: int, gradients: Tensor) -> None:
        """Adds to rows of ``buffers.Gated.sums``: gate gains from row 0, shifts 4, biases 8, c's 12."""
        sums = self.grads.sums[0].view(-1, gradients.shape[-1])
        sums[row : row + len(gradients)].add_(gradients)

    def _spread(self, t: int, da: Tensor) -> None:
        """Computes the gradients of the summands from that of the gates' sums, [4, B, H]."""
        p, grads = self.p, self.grads
        du = _by_block(grads.du[t % len(grads.du)])
        if p.weight_d is None:
            du.copy_(da)
            return
        u, gx, dgx = (_by_block(rows) for rows in (p.u[t], p.gx[t], grads.dgx[t]))
        d_h, d_x, _ = self.d.chunk(3)
        torch.mul(da, d_h, out=du)
        torch.mul(da, d_x, out=dgx)
        torch.mul(da, u.to(self.dtype), out=self.dd[:4])
        torch.mul(da, gx.to(self.dtype), out=self.dd[4:8])
        # The last third of dd is da itself, see __init__; ``_gates`` has filled z for this step.
        self.dweight.baddbmm_(self.z.transpose(1, 2), self.dd)
        _by_block(grads.dz[t], 12).copy_(torch.bmm(self.dd, p.weight_d.transpose(1, 2)))
        if t == 0:
            # The last step of the backward pass.
            grads.dweight_d[0].add_(self.dweight[:, :-1])
            self._add(8, self.dweight[8:, -1])


class _HighwayStep:
    """One layer of ``buffers.Highway``; see there for the names, and cells/rhn.py for the equations."""

    def __init__(self, p: Highway, grads: Any):
        self.p, self.grads = p, grads
        self.L, _, _, self.H = p.s.shape
        self.dtype = p.s.dtype

    def forward(self, n: int) -> None:
        p, (t, layer) = self.p, divmod(n, self.L)
        old, start = self._before(t, layer), self._start(t)
        h, gate = self._halves(t, layer)
        new = (1 - gate).mul_(old).addcmul_(self._keep(gate, t, layer), h)
        here = None if p.mask is None else p.mask[t].bool().unsqueeze(-1)
        last = layer == self.L - 1
        if last:
            new = zone(start, new, p.zone_h, t, p.zone_rate)
        if last or p.trace:
            y = p.y[t, :, layer * self.H : (layer + 1) * self.H] if p.trace else p.y[t]
            y.copy_(new if here is None else new.masked_fill(~here, 0.0))
        if here is not None:
            new = torch.where(here, new, start if last else 0.0)
        p.s[layer, t].copy_(new)
        if p.o is not None:
            p.o[layer, t].copy_(new)

    def backward(self, n: int) -> None:
        p, grads, (t, layer) = self.p, self.grads, divmod(n, self.L)
        H, last = self.H, layer == self.L - 1
        here = None if p.mask is None else p.mask[t].bool().unsqueeze(-1)
        ds = grads.ds_direct + grads.ds
        arriving = ds
        if grads.dy is not None and (last or p.trace):
            ds = ds + (grads.dy[t, :, layer * H : (layer + 1) * H] if p.trace else grads.dy[t])
        if here is not None:
            ds = ds.masked_fill(~here, 0.0)
        if last:
            # With ``trace`` the last layer is read before zoneout, but then there is no zoneout.
            stays = share(p.zone_h, t, p.zone_rate, self.dtype)
            past = ds * stays
            grads.past.copy_(past if here is None else torch.where(here, past, arriving))
            ds = ds * (1 - stays)
        h, gate = self._halves(t, layer)
        old = self._before(t, layer)
        da = torch.cat(
            [
                (ds * self._keep(gate, t, layer)) * (1 - h * h),
                (self._keep(ds * h, t, layer) - ds * old) * gate * (1 - gate),
            ],
            dim=-1,
        )
        grads.ds_direct.copy_(ds * (1 - gate))
        if layer == 0:
            grads.ds_direct.add_(grads.past)
        self._spread(t, layer, da)

    def _start(self, t: int) -> Tensor:
        """The state that the time step starts from."""
        return self.p.s[-1, t - 1] if t else self.p.s0

    def _before(self, t: int, layer: int) -> Tensor:
        """The state that the layer reads."""
        return self.p.s[layer - 1, t] if layer else self._start(t)

    def _products(self, t: int, layer: int) -> Tensor:
        """Returns what z scales, [B, 2 H]; without z, the sums without the bias."""
        u = self.p.u[layer, t].to(self.dtype)
        return u if layer else u + self.p.gx[t]

    def _scale(self, halves: Tensor, t: int, layer: int) -> Tensor:
        """Multiplies both halves by z with its bias."""
        scale = (self.p.z[layer, t] + self.p.bias_z[layer]).unsqueeze(1)
        return (halves.unflatten(-1, (2, -1)) * scale).flatten(-2)

    def _bias(self, t: int, layer: int) -> Tensor:
        """Returns the bias, one for each row or one for all."""
        p = self.p
        bias = p.bias[layer]
        if layer:
            return bias
        if p.first is not None:
            bias = bias * ~p.first[t].bool().unsqueeze(-1)
        return bias if p.bias_x is None else bias + p.bias_x

    def _halves(self, t: int, layer: int) -> tuple[Tensor, Tensor]:
        """Returns tanh of the first half of the sums and sigmoid of the second."""
        a = self._products(t, layer)
        if self.p.z is not None:
            a = self._scale(a, t, layer)
        h, gate = (a + self._bias(t, layer)).chunk(2, dim=-1)
        return torch.tanh(h), torch.sigmoid(gate)

    def _keep(self, x: Tensor, t: int, layer: int) -> Tensor:
        keep = self.p.keep
        if keep is None:
            return x
        return x * keep[t, :, layer * self.H : (layer + 1) * self.H] * self.p.keep_scale

    def _spread(self, t: int, layer: int, da: Tensor) -> None:
        """Computes the gradients of the summands from that of the sums."""
        p, grads, width, H = self.p, self.grads, 2 * self.H, self.H
        biased = da
        if layer == 0 and p.first is not None:
            biased = da * ~p.first[t].bool().unsqueeze(-1)
        grads.sums[0, layer * width : (layer + 1) * width] += biased.sum(0)
        if layer == 0 and p.bias_x is not None:
            grads.sums[0, self.L * width : (self.L + 1) * width] += da.sum(0)
        du = da
        if p.z is not None:
            dz = (da * self._products(t, layer)).unflatten(-1, (2, -1)).sum(1)
            grads.dz[layer, t % grads.dz.shape[1]].copy_(dz)
            grads.sums[0, (self.L + 1) * width :].view(-1, H)[layer] += dz.sum(0)
            du = self._scale(da, t, layer)
        grads.du[layer, t % grads.du.shape[1]].copy_(du)
        if layer == 0:
            grads.dgx[t].copy_(du)


def _by_block(rows: Tensor, blocks: int = 4) -> Tensor:
    """Views rows of blocks side by side, [B, K X], as [K, B, X]: gates, or the kinds of embeddings."""
    return rows.unflatten(-1, (blocks, -1)).transpose(0, 1)


def _normalise(x: Tensor, gain: Tensor | None, shift: Tensor | None, epsilon: float) -> tuple[Tensor, tuple]:
    """Normalises x over its last dimension, scales and shifts it; also returns what its backward needs."""
    y, *statistics = torch.native_layer_norm(x, x.shape[-1:], gain, shift, epsilon)
    return y, tuple(statistics)


def _normalise_backward(
    grad: Tensor, x: Tensor, statistics: tuple, gain: Tensor | None, shift: Tensor | None
) -> tuple:
    """Returns the gradients of x, gain and shift of ``_normalise``; None for an operand that is None."""
    wanted = [True, gain is not None, shift is not None]
    return torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], *statistics, gain, shift, wanted)


def sigmoid_backward(grad: Tensor, value: Tensor) -> Tensor:
    """Computes the gradient through a sigmoid from its value, in place in ``grad``."""
    return torch.ops.aten.sigmoid_backward.grad_input(grad, value, grad_input=grad)


def tanh_backward(grad: Tensor, value: Tensor) -> Tensor:
    """Computes the gradient through a tanh from its value, in place in ``grad``."""
    return torch.ops.aten.tanh_backward.grad_input(grad, value, grad_input=grad)


def share(mask: Tensor | None, t: int, rate: float, dtype) -> Tensor | float:
    """Returns the share of the old value that zoneout keeps at a step: its mask, or the expectation."""
    return rate if mask is None else mask[t].to(dtype)


def zone(old: Tensor, new: Tensor, mask: Tensor | None, t: int, rate: float) -> Tensor:
    """Applies zoneout with the mask of a step, or in expectation."""
    if mask is not None:
        return torch.where(mask[t].bool(), old.to(new.dtype), new)
    return new if rate == 0.0 else torch.lerp(new, old.to(new.dtype), rate)
