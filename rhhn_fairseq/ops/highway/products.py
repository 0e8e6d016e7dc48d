"""The products of a highway's layers with their recurrent matrices, forward and backward.

``Products`` takes the matrices as they are. ``ScaledProducts`` also computes the hypervectors z, by which the
point-wise work scales the products. ``RankScaledProducts`` scales the matrices by sums of outer products.

Shapes: T time, B batch, H hidden, L layers of a time step, N hyper, K steps of a block, d outer products, of
which the first scales the output only, and V = 2 d - 1 vectors, b_1 .. b_d, a_2 .. a_d.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import Highway, HighwayGradients
from rhhn_fairseq.ops.matmul.gemm import PackedWeight, mm
from rhhn_fairseq.ops.sequence import block_steps, operand_blocks, weight_gradient

BLOCK_ROWS = 256
"""Rows d B K of a block. With 512, d = 4 took 2 % less time and a fifth more memory."""


def make_products(p: Highway, weights: Sequence[Tensor], hyper: Sequence[Tensor], gemm: str) -> "Products":
    """Returns the products of a highway; ``hyper`` decides which kind."""
    if is_rank_scaled(hyper, len(weights)):
        return RankScaledProducts(p, weights, hyper, gemm)
    return (ScaledProducts if hyper else Products)(p, weights, hyper, gemm)


def is_rank_scaled(hyper: Sequence[Tensor], layers: int) -> bool:
    """Whether ``hyper`` has a map to the vectors of outer products, whose last row is a bias."""
    if not hyper:
        return False
    states_TBX, weight = hyper
    return weight.shape[1] == states_TBX.shape[-1] // layers + 1


def hypervectors(hyper: Sequence[Tensor], shape: torch.Size, gemm: str) -> Tensor | None:
    """Returns z [L, T, B, H] without its bias; None without a hypernetwork, or if it is not kept."""
    if not hyper or is_rank_scaled(hyper, shape[0]):
        return None
    states, weight_z = hyper
    z = weight_z.new_empty(shape)
    mm(rows_by_layer(states.unflatten(-1, (shape[0], -1))), weight_z, z.flatten(1, 2), gemm=gemm)
    return z


def rows_by_layer(tensor_KBLN: Tensor) -> Tensor:
    """Views some steps of a tensor as rows for each layer, [L, K B, N]."""
    return tensor_KBLN.flatten(0, 1).transpose(0, 1)


class Products:
    """See the module's docstring.

    Args:
        p: buffers of the pass. weights: W_l [H, 2 H] for each layer.
        hyper: as for ``highway``.
        gemm: implementation of the products, one of ``policy.GEMMS``.

    Attributes:
        plain: whether compiled code may compute these products instead of this class.
        forward_steps, steps: number of steps in a block of the forward and of the backward pass.
    """

    plain = True

    def __init__(self, p: Highway, weights: Sequence[Tensor], hyper: Sequence[Tensor], gemm: str):
        self.p, self.weights, self.gal, self.gemm = p, weights, p.gal, gemm
        self.L, self.T, self.B, self.H = p.s.shape
        self.forward_steps, self.steps = self.T, block_steps(self.T, self.B, p.u.dtype, p.s.dtype)
        self.rows = self.B
        """Rows of a step's product with a layer's matrix."""

    @functools.cached_property
    def packed(self) -> list[PackedWeight]:
        return [PackedWeight(weight, self.T, self.rows, self.gemm) for weight in self.weights]

    @functools.cached_property
    def packed_transposes(self) -> list[PackedWeight]:
        return [PackedWeight(weight, self.T, self.rows, self.gemm, transpose=True) for weight in self.weights]

    @functools.cached_property
    def du(self) -> list[tuple[Tensor, ...]]:
        """Gradients of the products, [B, 2 H], by layer and step of a block."""
        return [of_layer.unbind(0) for of_layer in self.grads.du.unbind(0)]

    def begin_block(self, t: int) -> None:
        """Called before the steps of the block that starts at step t, in either direction."""

    def multiply(self, layer: int, t: int, read: Tensor, out: Tensor) -> None:
        """Writes the product of ``read`` [B, H] with a layer's matrix at step t to ``out`` [B, 2 H]."""
        self.packed[layer].product(read, out)

    def start_backward(self, grads: HighwayGradients) -> None:
        """Called before the backward pass."""
        self.grads = grads
        self.dweights = [self.p.u.new_empty(self.H, 2 * self.H) for _ in self.weights]

    def multiply_backward(self, layer: int, t: int) -> None:
        """Writes the gradient of a product's input to ``ds``, from that of the product in ``du``."""
        self.packed_transposes[layer].product(self.du[layer][t % self.steps], self.grads.ds)

    def end_block(self, t: int) -> None:
        """Adds the weights' gradients of the block that starts at step t; the last block, run first, writes
        them."""
        p, gal, states = self.p, self.gal, self.p.operands
        steps = slice(t, min(t + self.steps, self.T))
        blocks = [operand_blocks(p.s0.to(states.dtype), states[-1], gal, steps)]
        for below in states[:-1, steps]:
            blocks.append([below if gal is None else below * gal])
        du = self.grads.du[:, : steps.stop - t]
        for own, read, du_TBG in zip(self.dweights, blocks, du, strict=True):
            weight_gradient(read, du_TBG, self.gemm, own, add=steps.stop < self.T)

    def weight_gradients(self) -> list[Tensor]:
        """Returns the gradients of ``weights`` after the backward pass."""
        return [dweight.to(self.p.u.dtype) for dweight in self.dweights]

    def hyper_gradients(self) -> Sequence[Tensor]:
        """Returns the gradients of ``hyper`` after the backward pass."""
        return ()


class ScaledProducts(Products):
    """See the module's docstring.

    Args:
        hyper: states of the hypernetwork [T, B, L N], and weight_z [L, N, H], which maps them to z.
    """

    def __init__(self, p, weights, hyper, gemm):
        super().__init__(p, weights, hyper, gemm)
        states, self.weight_z = hyper
        self.hyper_TBLN = states.unflatten(-1, (self.L, -1))

    def start_backward(self, grads):
        super().start_backward(grads)
        self.dhyper_TBLN, self.dweight_z = torch.empty_like(self.hyper_TBLN), torch.empty_like(self.weight_z)

    def end_block(self, t):
        super().end_block(t)
        block, dz = slice(t, t + self.steps), self.grads.dz[:, : self.T - t].flatten(1, 2)
        mm(dz, self.weight_z.mT, rows_by_layer(self.dhyper_TBLN[block]), gemm=self.gemm)
        before = self.dweight_z if block.stop < self.T else None
        mm(rows_by_layer(self.hyper_TBLN[block]).mT, dz, self.dweight_z, before, self.gemm)

    def hyper_gradients(self):
        return self.dhyper_TBLN.flatten(2), self.dweight_z


class RankScaledProducts(Products):
    """See the module's docstring.

    With ``s (W * sum_i a_i b_i^T) = sum_i ((s * a_i) W) * b_i`` (``rank_scaling``), a layer of a time step is
    one matrix product with d B rows. The vectors are computed for one block of steps at a time. The backward
    pass recomputes them and the products, so d only takes memory for the steps of one block.

    Args:
        hyper: states of the hypernetwork [T, B, L N], and the map from them to the vectors, [L, N + 1, V H],
            whose last row is its bias.
    """

    plain = False

    def __init__(self, p, weights, hyper, gemm):
        super().__init__(p, weights, hyper, gemm)
        states, self.map_v = hyper
        self.hyper_TBLN = states.unflatten(-1, (self.L, -1))
        self.V = self.map_v.shape[-1] // self.H
        self.d = (self.V + 1) // 2
        self.forward_steps = self.steps = max(1, min(self.T, BLOCK_ROWS // (self.d * self.B)))
        self.products = states.new_empty(self.d, self.B, 2, self.H)
        self.rows = self.d * self.B

    @functools.cached_property
    def scaled_inputs(self) -> Tensor:
        """Buffer for the inputs of a matrix in a step of the forward pass, [d, B, H]."""
        return self.products.new_empty(self.d, self.B, self.H)

    def _rows(self, tensor_TBLN: Tensor) -> Tensor:
        """Views the block's steps of a tensor as rows by layer, [L, K B, N]."""
        return rows_by_layer(tensor_TBLN[self.start : self.start + self.steps])

    def begin_block(self, t: int) -> None:
        """Computes b [L, K, d, B, H] and a [L, K, d - 1, B, H] of the block that starts at step t."""
        self.start = t
        vectors = torch.baddbmm(self.map_v[:, -1:], self._rows(self.hyper_TBLN), self.map_v[:, :-1])
        vectors = vectors.unflatten(1, (-1, self.B)).unflatten(-1, (self.V, self.H))
        vectors = vectors.transpose(2, 3).contiguous()
        self.b, self.a = vectors[:, :, : self.d], vectors[:, :, self.d :]

    def _multiply_scaled(self, layer: int, k: int, read: Tensor, inputs: Tensor) -> None:
        """Writes the scaled inputs of a layer at step k of the block to ``inputs``; makes their products."""
        inputs[0] = read
        torch.mul(read, self.a[layer, k], out=inputs[1:])
        self.packed[layer].product(inputs.flatten(0, 1), self.products.view(-1, 2 * self.H))

    def multiply(self, layer, t, read, out):
        k = t - self.start
        self._multiply_scaled(layer, k, read, self.scaled_inputs)
        self.products *= self.b[layer, k].unsqueeze(2)
        torch.sum(self.products, 0, out=out.view(self.B, 2, self.H))

    def start_backward(self, grads):
        self.grads = grads
        L, K, new = self.L, self.steps, self.products.new_empty
        self.inputs = new(L, K, self.d, self.B, self.H)
        self.dproducts = new(L, K, self.d, self.B, 2, self.H)
        self.dvectors = new(L, K, self.V, self.B, self.H)
        self.dinputs = new(self.d, self.B, self.H)
        self.dhyper_TBLN = torch.empty_like(self.hyper_TBLN)
        # Gradients of weights accumulate in the state type.
        self.dmap = self.p.s.new_zeros(self.map_v.shape)
        self.dweights = [self.p.s.new_zeros(self.H, 2 * self.H) for _ in self.weights]

    def _read(self, layer: int, t: int) -> Tensor:
        """Returns the input of a layer's matrix at a step, [B, H]."""
        states, before = self.p.operands, t * self.L + layer - 1
        read = self.p.s0.to(states.dtype) if before < 0 else states[before % self.L, before // self.L]
        return read if self.gal is None else read * self.gal

    def multiply_backward(self, layer, t):
        k, read = t - self.start, self._read(layer, t)
        dproducts, dvectors = self.dproducts[layer, k], self.dvectors[layer, k]
        du = self.du[layer][k].view(self.B, 2, self.H)
        self._multiply_scaled(layer, k, read, self.inputs[layer, k])
        self.products *= du
        torch.sum(self.products, 2, out=dvectors[: self.d])
        torch.mul(du, self.b[layer, k].unsqueeze(2), out=dproducts)
        rows = dproducts.view(-1, 2 * self.H)
        self.packed_transposes[layer].product(rows, self.dinputs.flatten(0, 1))
        torch.mul(self.dinputs[1:], read, out=dvectors[self.d :])
        self.dinputs[1:] *= self.a[layer, k]
        torch.sum(self.dinputs, 0, out=self.grads.ds)

    def end_block(self, t):
        K = min(self.steps, self.T - t)
        for layer, dweight in enumerate(self.dweights):
            inputs = self.inputs[layer, :K].view(-1, self.H)
            dproducts = self.dproducts[layer, :K].view(-1, 2 * self.H)
            dweight += mm(inputs.t(), dproducts, gemm=self.gemm)
        dvectors = self.dvectors[:, :K].transpose(2, 3).flatten(3).flatten(1, 2)
        self._rows(self.dhyper_TBLN).copy_(torch.bmm(dvectors, self.map_v[:, :-1].mT))
        self.dmap[:, :-1] += torch.bmm(self._rows(self.hyper_TBLN).mT, dvectors)
        self.dmap[:, -1] += dvectors.sum(1)

    def hyper_gradients(self):
        return self.dhyper_TBLN.flatten(2), self.dmap.to(self.map_v.dtype)
