"""The point-wise part of a time step in torch's own operations: any device, and what C++ falls back on.

Gates are kept gate-major, [4, B, H], so that each is one contiguous block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rhhn_fairseq.kernels.buffers import Gated, Highway


def gated(p: Gated, direction: str) -> Callable[[int], None]:
    """The function that runs one step of a sequence, forward or backward."""
    step = _GatedStep(p)
    return step.forward if direction == "forward" else step.backward


class _GatedStep:
    """One step of ``buffers.Gated``; see there for the names, and cells/lstm.py for the equations."""

    def __init__(self, p: Gated):
        self.p = p
        self.dtype = p.c.dtype
        self._made: tuple = (None, None)

    def forward(self, t: int) -> None:
        p = self.p
        h_old, c_old = self._before(t)
        gates, _ = self._normal_gates(t)
        i, f, g, o = gates
        f.add_(p.forget_bias).sigmoid_()
        i.sigmoid_()
        update = self._keep(g.tanh_(), t)
        c = torch.mul(f, c_old).addcmul_(i, update)
        inner = c if p.c_gain is None else torch.addcmul(p.c_shift, normalise(c, p.epsilon)[0], p.c_gain)
        h = o.sigmoid_().mul_(torch.tanh(inner))
        h = zone(h_old.to(self.dtype), h, p.zone_h, t, p.zone_h_rate)
        c = zone(c_old, c, p.zone_c, t, p.zone_c_rate)
        if p.mask is None:
            p.h[t].copy_(h)
            p.c[t].copy_(c)
            return
        here = p.mask[t].bool().unsqueeze(-1)
        torch.where(here, h.to(h_old.dtype), h_old, out=p.h[t])
        torch.where(here, c, c_old, out=p.c[t])
        torch.mul(p.h[t], here, out=p.y[t])

    def backward(self, t: int) -> None:
        p = self.p
        H = p.c.shape[-1]
        _, c_old = self._before(t)
        gates, normal = self._normal_gates(t)
        i, f, g, o = gates
        f.add_(p.forget_bias).sigmoid_()
        i.sigmoid_()
        o.sigmoid_()
        g.tanh_()
        update = self._keep(g, t)
        inner = torch.mul(f, c_old).addcmul_(i, update)
        if p.c_gain is not None:
            c_normal, c_rstd = normalise(inner, p.epsilon)
            inner = torch.addcmul(p.c_shift, c_normal, p.c_gain)
        inner = torch.tanh(inner)

        dh, dc = self._arriving(t)
        dc_here, here = dc, None
        if p.mask is not None:
            # With nothing arriving at padding, all that follows is zero there.
            here = p.mask[t].bool().unsqueeze(-1)
            dh, dc_here = dh.masked_fill(~here, 0.0), dc.masked_fill(~here, 0.0)
        stays_c = share(p.zone_c, t, p.zone_c_rate, self.dtype)
        da = torch.empty_like(gates)
        d_i, d_f, d_g, d_o = da
        torch.mul(dh * inner, o, out=d_o).mul_(1 - o)
        dc_new = (dh * o).mul_(1 - inner * inner)
        if p.c_gain is not None:
            dc_new = self._normalise_backward(dc_new, c_normal, c_rstd, p.c_gain, 12 * H, 13 * H)
        dc_new = dc_new.add_(dc_here * (1 - stays_c))
        through = dc_new * f
        if p.c_scale is not None:
            through.mul_(p.c_scale[t])
        through = through.add_(dc_here * stays_c)
        p.dc.copy_(through if here is None else torch.where(here, through, dc))
        torch.mul(dc_new * c_old, f, out=d_f).mul_(1 - f)
        torch.mul(self._keep(dc_new * i, t), 1 - g * g, out=d_g)
        torch.mul(dc_new * update, i, out=d_i).mul_(1 - i)
        if p.gate_gain is not None:
            gain = p.gate_gain.view(4, 1, H)
            da = self._normalise_backward(da, *normal, gain, 0, 4 * H)
        self._spread(t, da)

    def _before(self, t: int) -> tuple[Tensor, Tensor]:
        """h and c before step t."""
        return (self.p.h[t - 1], self.p.c[t - 1]) if t else (self.p.h0, self.p.c0)

    def _gate_major(self, rows: Tensor) -> Tensor:
        """[4, B, H] of [B, 4 H], a view."""
        return rows.unflatten(-1, (4, -1)).transpose(0, 1)

    def _normal_gates(self, t: int) -> tuple[Tensor, tuple | None]:
        """The gates' sums [4, B, H] after normalisation, and what its backward needs."""
        p = self.p
        u = self._gate_major(p.u[t]).to(self.dtype)
        if p.weight_d is None:
            a = u.clone(memory_format=torch.contiguous_format)
        else:
            d_h, d_x, b = self._scaling(t)
            a = torch.addcmul(b + p.bias.unsqueeze(1), d_x, self._gate_major(p.gx[t]).to(self.dtype))
            a.addcmul_(d_h, u)
        if p.gate_gain is None:
            return a, None
        H = a.shape[-1]
        normal, rstd = normalise(a, p.epsilon)
        a = torch.addcmul(p.gate_shift.view(4, 1, H), normal, p.gate_gain.view(4, 1, H))
        return a, (normal, rstd)

    def _embeddings(self, z: Tensor) -> Tensor:
        """z by kind, [12, B, Z], a view of [B, 12 Z]."""
        return z.unflatten(-1, (12, -1)).transpose(0, 1)

    def _scaling(self, t: int) -> tuple[Tensor, ...]:
        """d_h, d_x and b of all gates, [4, B, H] each; kept for the backward's second use."""
        if self._made[0] != t:
            d = torch.bmm(self._embeddings(self.p.z[t]).to(self.dtype), self.p.weight_d)
            self._made = t, d.chunk(3)
        return self._made[1]

    def _keep(self, update: Tensor, t: int) -> Tensor:
        keep = self.p.keep
        if keep is None:
            return update
        return update * keep[t if len(keep) > 1 else 0] * self.p.keep_scale

    def _arriving(self, t: int) -> tuple[Tensor, Tensor]:
        """The gradients that reach the new h and c; leaves in dh_direct what goes past the step."""
        p = self.p
        through = p.dh.to(self.dtype)
        dh = through if p.dy is None else through + p.dy[t]
        if p.dh_direct is None:
            return dh, p.dc
        stays = share(p.zone_h, t, p.zone_h_rate, self.dtype)
        everything = dh + p.dh_direct
        past = everything * stays
        if p.mask is not None:
            # Padding has no output, so that dy ends there.
            past = torch.where(p.mask[t].bool().unsqueeze(-1), past, through + p.dh_direct)
        p.dh_direct.copy_(past)
        return everything * (1 - stays), p.dc

    def _normalise_backward(self, grad, normal, rstd, gain, gain_at: int, shift_at: int) -> Tensor:
        """The gradient of what was normalised; adds to the sums at two places."""
        sums, size = self.p.sums[0], gain.numel()
        sums[gain_at : gain_at + size] += (grad * normal).sum(-2).reshape(-1)
        sums[shift_at : shift_at + size] += grad.sum(-2).reshape(-1)
        return normalise_backward(grad * gain, normal, rstd)

    def _spread(self, t: int, da: Tensor) -> None:
        """From the gradient of the gates' sums to those of their parts."""
        p = self.p
        du = self._gate_major(p.du[t])
        if p.weight_d is None:
            du.copy_(da)
            return
        H = da.shape[-1]
        d_h, d_x, _ = self._scaling(t)
        du.copy_(da * d_h)
        self._gate_major(p.dgx[t]).copy_(da * d_x)
        p.sums[0, 8 * H : 12 * H] += da.sum(1).view(-1)
        dd = torch.cat([da * self._gate_major(p.u[t]), da * self._gate_major(p.gx[t]), da])
        z = self._embeddings(p.z[t]).to(self.dtype)
        p.dweight_d[0].baddbmm_(z.transpose(1, 2), dd)
        self._embeddings(p.dz[t]).copy_(torch.bmm(dd, p.weight_d.transpose(1, 2)))


def highway(p: Highway, direction: str) -> Callable[[int], None]:
    """The function that runs one layer of a time step, number ``t L + l``, forward or backward."""
    step = _HighwayStep(p)
    return step.forward if direction == "forward" else step.backward


class _HighwayStep:
    """One layer of ``buffers.Highway``; see there for the names, and cells/rhn.py for the equations."""

    def __init__(self, p: Highway):
        self.p = p
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
            new = zone(start, new, p.zone, t, p.zone_rate)
        if last or p.trace:
            y = p.y[t, :, layer * self.H : (layer + 1) * self.H] if p.trace else p.y[t]
            y.copy_(new if here is None else new * here)
        if here is not None:
            new = torch.where(here, new, start if last else 0.0)
        p.s[layer, t].copy_(new)
        if p.o is not None:
            p.o[layer, t].copy_(new)

    def backward(self, n: int) -> None:
        p, (t, layer) = self.p, divmod(n, self.L)
        H, last = self.H, layer == self.L - 1
        here = None if p.mask is None else p.mask[t].bool().unsqueeze(-1)
        ds = p.ds_direct + p.ds
        arriving = ds
        if p.dy is not None and (last or p.trace):
            ds = ds + (p.dy[t, :, layer * H : (layer + 1) * H] if p.trace else p.dy[t])
        if here is not None:
            ds = ds * here
        if last:
            # The states after all layers are read before zoneout; only there is no zoneout then.
            stays = share(p.zone, t, p.zone_rate, self.dtype)
            past = ds * stays
            p.past.copy_(past if here is None else torch.where(here, past, arriving))
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
        p.ds_direct.copy_(ds * (1 - gate))
        if layer == 0:
            p.ds_direct.add_(p.past)
        self._spread(t, layer, da)

    def _start(self, t: int) -> Tensor:
        """The state that the time step starts from."""
        return self.p.s[-1, t - 1] if t else self.p.s0

    def _before(self, t: int, layer: int) -> Tensor:
        """The state that the layer reads."""
        return self.p.s[layer - 1, t] if layer else self._start(t)

    def _products(self, t: int, layer: int) -> Tensor:
        """What z scales, [B, 2 H]; without z, all but the bias."""
        u = self.p.u[layer, t].to(self.dtype)
        return u if layer else u + self.p.gx[t]

    def _bias(self, t: int, layer: int) -> Tensor:
        """The bias of each row or of all."""
        p = self.p
        bias = p.bias[layer]
        if layer:
            return bias
        if p.first is not None:
            bias = bias * ~p.first[t].bool().unsqueeze(-1)
        return bias if p.bias_x is None else bias + p.bias_x

    def _halves(self, t: int, layer: int) -> tuple[Tensor, Tensor]:
        """tanh and sigmoid of the sums."""
        a = self._products(t, layer)
        if self.p.z is not None:
            a = (a.unflatten(-1, (2, -1)) * self.p.z[layer, t].unsqueeze(1)).flatten(-2)
        h, gate = (a + self._bias(t, layer)).chunk(2, dim=-1)
        return torch.tanh(h), torch.sigmoid(gate)

    def _keep(self, x: Tensor, t: int, layer: int) -> Tensor:
        keep = self.p.keep
        if keep is None:
            return x
        return x * keep[t, :, layer * self.H : (layer + 1) * self.H] * self.p.keep_scale

    def _spread(self, t: int, layer: int, da: Tensor) -> None:
        """From the gradient of the sums to those of their parts."""
        p, width = self.p, 2 * self.H
        biased = da
        if layer == 0 and p.first is not None:
            biased = da * ~p.first[t].bool().unsqueeze(-1)
        p.sums[0, layer * width : (layer + 1) * width] += biased.sum(0)
        if layer == 0 and p.bias_x is not None:
            p.sums[0, self.L * width :] += da.sum(0)
        du = da
        if p.z is not None:
            halves = da.unflatten(-1, (2, -1))
            products = self._products(t, layer).unflatten(-1, (2, -1))
            p.dz[layer, t].copy_((halves * products).sum(1))
            du = (halves * p.z[layer, t].unsqueeze(1)).flatten(-2)
        p.du[layer, t].copy_(du)
        if layer == 0:
            p.dgx[t].copy_(du)


def normalise(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Mean zero and variance one in the last dimension; the result and one over the deviation."""
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + epsilon)
    return centred.mul_(rstd), rstd


def normalise_backward(grad: Tensor, normal: Tensor, rstd: Tensor) -> Tensor:
    """The gradient of x from that of ``normalise(x)``."""
    inner = grad - grad.mean(-1, keepdim=True)
    return inner.addcmul_(normal, (grad * normal).mean(-1, keepdim=True), value=-1).mul_(rstd)


def share(mask: Tensor | None, t: int, rate: float, dtype) -> Tensor | float:
    """How much of the old value zoneout keeps at a step: its mask, or the expectation."""
    return rate if mask is None else mask[t].to(dtype)


def zone(old: Tensor, new: Tensor, mask: Tensor | None, t: int, rate: float) -> Tensor:
    """Zoneout with the mask of a step, or in expectation."""
    if mask is not None:
        return torch.where(mask[t].bool(), old, new)
    return new if rate == 0.0 else torch.lerp(new, old, rate)
