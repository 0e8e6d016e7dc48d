"""The products of a highway whose recurrent matrices a sum of outer products scales, for ``highway``.

With ``s (W * sum_i a_i b_i^T) = sum_i ((s * a_i) W) * b_i`` (``rank_scaling``), a layer of a time step is one
matrix product of d B rows. The vectors are made for a block of steps at a time. The backward pass makes them
again, and the products, so that d takes memory for the steps of a block alone.

Shapes: T time, B batch, H hidden, L layers of a time step, N hyper, K steps of a block, d terms, of which the
first scales the output alone; V = 2 d - 1 vectors, b_1 .. b_d, a_2 .. a_d.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops.gemm import PackedWeight, mm

BLOCK_ROWS = 256
"""Rows d B K of a block: with 512 it takes no less time, and a quarter more memory with d = 4."""


def is_ranked(hyper: Sequence[Tensor], layers: int) -> bool:
    """Whether what a highway was given of its hypernetwork makes vectors of outer products."""
    if not hyper:
        return False
    states_TBX, weight = hyper
    return weight.shape[1] == states_TBX.shape[-1] // layers + 1


class RankedProducts:
    """See the module's docstring.

    Args:
        hyper: states of the hypernetwork [T, B, L N], and the map from them to the vectors, [L, N + 1, V H],
            with its bias as the last row.
        weights: W_l [H, 2 H] for each layer.
        gemm: who multiplies.
    """

    def __init__(self, hyper: Sequence[Tensor], weights: Sequence[Tensor], gemm: str):
        states, self.map_v = hyper
        self.weights, self.gemm = weights, gemm
        self.hyper_TBLN = states.unflatten(-1, (len(weights), -1))
        self.T, self.B = states.shape[:2]
        self.H = len(weights[0])
        self.V = self.map_v.shape[-1] // self.H
        self.d = (self.V + 1) // 2
        self.steps = max(1, min(self.T, BLOCK_ROWS // (self.d * self.B)))
        self.products = states.new_empty(self.d, self.B, 2, self.H)

    def _pack(self, transpose: bool) -> list[PackedWeight]:
        rows = self.d * self.B
        return [PackedWeight(weight, self.T, rows, self.gemm, transpose) for weight in self.weights]

    def _rows(self, tensor_TBLN: Tensor) -> Tensor:
        """The block's steps of a tensor as rows of each layer, [L, K B, N], a view."""
        return tensor_TBLN[self.start : self.start + self.steps].flatten(0, 1).transpose(0, 1)

    def _make_vectors(self, t: int) -> None:
        """Makes b [L, K, d, B, H] and a [L, K, d - 1, B, H] of the block that starts at step t."""
        self.start = t
        vectors = torch.baddbmm(self.map_v[:, -1:], self._rows(self.hyper_TBLN), self.map_v[:, :-1])
        vectors = vectors.unflatten(1, (-1, self.B)).unflatten(-1, (self.V, self.H))
        vectors = vectors.transpose(2, 3).contiguous()
        self.b, self.a = vectors[:, :, : self.d], vectors[:, :, self.d :]

    def _scale_inputs(self, layer: int, k: int, read: Tensor, inputs: Tensor) -> None:
        inputs[0] = read
        torch.mul(read, self.a[layer, k], out=inputs[1:])

    def start_forward(self) -> None:
        self.packed = self._pack(transpose=False)
        self.inputs = self.products.new_empty(self.d, self.B, self.H)

    before_forward = _make_vectors

    def multiply(self, layer: int, t: int, read: Tensor, out: Tensor) -> None:
        """Writes the product of one layer and step, with ``read`` [B, H], to ``out`` [B, 2 H]."""
        k = t - self.start
        self._scale_inputs(layer, k, read, self.inputs)
        self.packed[layer].product(self.inputs.flatten(0, 1), self.products.view(-1, 2 * self.H))
        self.products *= self.b[layer, k].unsqueeze(2)
        torch.sum(self.products, 0, out=out.view(self.B, 2, self.H))

    def start_backward(self, like: Tensor) -> None:
        """Makes room for the gradients.

        Args:
            like: a state; the gradients of weights are added up in its type.
        """
        self.packed, self.packed_back = self._pack(transpose=False), self._pack(transpose=True)
        L, K = len(self.weights), self.steps
        self.inputs = self.products.new_empty(L, K, self.d, self.B, self.H)
        self.dproducts = self.products.new_empty(L, K, self.d, self.B, 2, self.H)
        self.dvectors = self.products.new_empty(L, K, self.V, self.B, self.H)
        self.dinputs = self.products.new_empty(self.d, self.B, self.H)
        self.dhyper_TBLN = torch.empty_like(self.hyper_TBLN)
        self.dmap = like.new_zeros(self.map_v.shape)
        self.dweights = like.new_zeros(L, self.H, 2 * self.H)

    before_backward = _make_vectors

    def multiply_backward(self, layer: int, t: int, read: Tensor, du: Tensor, ds: Tensor) -> None:
        """Writes the gradient of what a product read to ``ds`` [B, H], from its own, ``du`` [B, 2 H]."""
        k = t - self.start
        inputs, dproducts, dvectors = self.inputs[layer, k], self.dproducts[layer, k], self.dvectors[layer, k]
        du = du.view(self.B, 2, self.H)
        self._scale_inputs(layer, k, read, inputs)
        self.packed[layer].product(inputs.flatten(0, 1), self.products.view(-1, 2 * self.H))
        self.products *= du
        torch.sum(self.products, 2, out=dvectors[: self.d])
        torch.mul(du, self.b[layer, k].unsqueeze(2), out=dproducts)
        self.packed_back[layer].product(dproducts.view(-1, 2 * self.H), self.dinputs.flatten(0, 1))
        torch.mul(self.dinputs[1:], read, out=dvectors[self.d :])
        self.dinputs[1:] *= self.a[layer, k]
        torch.sum(self.dinputs, 0, out=ds)

    def after_backward(self, t: int) -> None:
        """Goes on with the gradients of the vectors and weights in the block that starts at step t."""
        K = min(self.steps, self.T - t)
        for layer, dweight in enumerate(self.dweights):
            inputs = self.inputs[layer, :K].view(-1, self.H)
            dproducts = self.dproducts[layer, :K].view(-1, 2 * self.H)
            dweight += mm(inputs.t(), dproducts, gemm=self.gemm)
        dvectors = self.dvectors[:, :K].transpose(2, 3).flatten(3).flatten(1, 2)
        self._rows(self.dhyper_TBLN).copy_(torch.bmm(dvectors, self.map_v[:, :-1].mT))
        self.dmap[:, :-1] += torch.bmm(self._rows(self.hyper_TBLN).mT, dvectors)
        self.dmap[:, -1] += dvectors.sum(1)
