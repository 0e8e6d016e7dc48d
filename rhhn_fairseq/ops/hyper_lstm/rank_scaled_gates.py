"""The sums of an LSTM's gates where a hypernetwork scales W_h by a sum of outer products, for ``hyper_lstm``.

With ``h (W * sum_i a_i b_i^T) = sum_i ((h * a_i) W) * b_i`` (``rank_scaling``), a step is one matrix product
with d B rows. The backward pass recomputes each step's vectors and products, so d takes memory for one step.

Shapes: T time, B batch, H hidden, Z embedding, d terms, of which the first, d_h, scales the output only.
"""

import torch
from torch import Tensor

from rhhn_fairseq.ops.matmul.gemm import PackedWeight, mm


class RankScaledGates:
    """See the module's docstring.

    Args:
        weight: W_h [H, 4 H].
        weight_d: maps z to d_h, d_x and b, [12, Z, H]; bias is added to b, [4, H]; both of the state type.
        weight_r: maps the last Z numbers of z to a_2 .. a_d, b_2 .. b_d, [Z + 1, (d - 1) 5 H]; its last row
            is the bias.
        gx: x W_x [T, B, 4 H].
        gemm: implementation of the products, one of ``policy.GEMMS``.
    """

    def __init__(
        self, weight: Tensor, weight_d: Tensor, bias: Tensor, weight_r: Tensor, gx: Tensor, gemm: str
    ):
        (T, B, _), self.H, self.Z = gx.shape, len(weight), weight_d.shape[1]
        self.weight_d, self.bias, self.gx, self.gemm = weight_d, bias, gx, gemm
        self.weight_r = weight_r.to(bias.dtype)
        self.terms = weight_r.shape[1] // (5 * self.H)
        self.weight, self.T = weight, T
        self.packed = PackedWeight(weight, T, (self.terms + 1) * B, gemm)
        self.inputs = gx.new_empty(self.terms + 1, B, self.H)
        self.products = gx.new_empty(self.terms + 1, B, 4 * self.H)

    def _prepare(self, t: int, h: Tensor, z: Tensor) -> None:
        """Computes the vectors and the products of a step."""
        B, H, n = len(h), self.H, self.terms * self.H
        self.z = z.to(self.bias.dtype).unflatten(-1, (13, self.Z)).transpose(0, 1)
        self.d_h, self.d_x, self.b = torch.bmm(self.z[:12], self.weight_d).chunk(3)
        vectors = torch.addmm(self.weight_r[-1], self.z[12], self.weight_r[:-1])
        self.a = vectors[:, :n].view(B, -1, H).transpose(0, 1)
        further = vectors[:, n:].view(B, -1, 4 * H).transpose(0, 1)
        self.scales = torch.cat((_by_row(self.d_h).unsqueeze(0), further))
        self.x = self.gx[t].view(B, 4, H).transpose(0, 1)
        self.inputs[0] = h
        self.inputs[1:] = h * self.a
        self.packed.product(self.inputs.flatten(0, 1), self.products.flatten(0, 1))

    def forward(self, t: int, h: Tensor, z: Tensor, out: Tensor) -> None:
        """Writes the sums of the gates of a step, [B, 4 H], to ``out``.

        Args:
            h: what W_h multiplies, [B, H]. z: [B, 13 Z].
        """
        self._prepare(t, h, z)
        rest = torch.addcmul(self.b + self.bias.unsqueeze(1), self.d_x, self.x.to(self.bias.dtype))
        out.copy_((self.products * self.scales).sum(0) + _by_row(rest))

    def start_backward(self) -> None:
        like = self.bias
        rows = len(self.products) * self.products.shape[1]
        self.packed_back = PackedWeight(self.weight, self.T, rows, self.gemm, transpose=True)
        self.dweight = like.new_zeros(self.H, 4 * self.H)
        self.dweight_d, self.dbias = torch.zeros_like(self.weight_d), torch.zeros_like(like)
        self.dweight_r = torch.zeros_like(self.weight_r)

    def backward(self, t: int, h: Tensor, z: Tensor, du: Tensor, dz: Tensor, dgx: Tensor) -> Tensor:
        """Backpropagates the gradients ``du`` of a step's sums, [B, 4 H].

        Args:
            dz, dgx: where the gradients of z and of x W_x are written.

        Returns:
            the gradient of h.
        """
        self._prepare(t, h, z)
        B, H = len(h), self.H
        du = du.to(self.bias.dtype)
        by_gate = du.view(B, 4, H).transpose(0, 1)
        dscales = du * self.products
        dproducts = (du * self.scales).to(h.dtype)
        dinputs = torch.empty_like(self.inputs)
        self.packed_back.product(dproducts.flatten(0, 1), dinputs.flatten(0, 1))
        self.dweight += mm(self.inputs.flatten(0, 1).t(), dproducts.flatten(0, 1), gemm=self.gemm)
        dd = torch.cat((dscales[0].view(B, 4, H).transpose(0, 1), by_gate * self.x, by_gate))
        self.dweight_d += torch.bmm(self.z[:12].mT, dd)
        self.dbias += by_gate.sum(1)
        da = dinputs[1:] * h
        dvectors = torch.cat([_by_row(da).to(du.dtype), _by_row(dscales[1:])], dim=1)
        self.dweight_r[:-1] += self.z[12].t() @ dvectors
        self.dweight_r[-1] += dvectors.sum(0)
        dz_13BZ = torch.cat(
            (torch.bmm(dd, self.weight_d.mT), (dvectors @ self.weight_r[:-1].t()).unsqueeze(0))
        )
        dz.copy_(_by_row(dz_13BZ))
        dgx.copy_(_by_row(by_gate * self.d_x))
        return (dinputs[0] + (dinputs[1:] * self.a).sum(0)).to(h.dtype)


def _by_row(stack_KBX: Tensor) -> Tensor:
    """Lays the matrices of a stack [K, B, X] side by side, [B, K X]."""
    return stack_KBX.transpose(0, 1).flatten(1)
