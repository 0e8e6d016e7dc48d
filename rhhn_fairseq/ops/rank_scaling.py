"""Products with a matrix scaled by a sum of outer products, which is never in memory.

``s (W * sum_i a_i b_i^T) = sum_i ((s * a_i) W) * b_i`` (Suarez 2017, equation 8), with vectors a_i and b_i of
each sequence. The forward pass keeps s and what makes the vectors; the backward pass makes vectors and
products again. Beside the operands that is O(d B (in + out)) numbers for one step at a time; the scaled
matrices would be O(B in out) at every step.

Shapes: B batch, N width of what the vectors are made from, H input, G output, d terms.
"""

import torch
from torch import Tensor


class _RankScaled(torch.autograd.Function):
    """See ``rank_scaled``."""

    @staticmethod
    def forward(s_BH, weight_HG, hyper_BN, weight_z, bias_z):
        a, b = _vectors(s_BH, hyper_BN, weight_z, bias_z)
        products = (s_BH.unsqueeze(1) * a) @ weight_HG
        return (_split_width(products, s_BH) * b.unsqueeze(2)).sum(1).flatten(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        s, weight, hyper, weight_z, bias_z = ctx.saved_tensors
        (g,) = gradients
        a, b = _vectors(s, hyper, weight_z, bias_z)
        inputs = s.unsqueeze(1) * a
        g_split = g.unflatten(-1, (-1, s.shape[-1])).unsqueeze(1)
        d_products = (g_split * b.unsqueeze(2)).flatten(2)
        db = (g_split * _split_width(inputs @ weight, s)).sum(2)
        d_inputs = d_products @ weight.mT
        ds = (d_inputs * a).sum(1)
        d_weight = inputs.flatten(0, 1).mT @ d_products.flatten(0, 1)
        dz = torch.cat((d_inputs * s.unsqueeze(1), db), dim=1).flatten(1)
        return ds, d_weight, dz @ weight_z.mT, hyper.mT @ dz, dz.sum(0)


def _vectors(s_BH: Tensor, hyper_BN: Tensor, weight_z: Tensor, bias_z: Tensor) -> tuple[Tensor, Tensor]:
    """a and b, each [B, d, H]."""
    z = torch.addmm(bias_z, hyper_BN, weight_z).unflatten(-1, (-1, s_BH.shape[-1]))
    a, b = z.chunk(2, dim=1)
    return a, b


def _split_width(products_BdG: Tensor, s_BH: Tensor) -> Tensor:
    """Products [B, d, G] as [B, d, G / H, H]: the same b_i scales every part."""
    return products_BdG.unflatten(-1, (-1, s_BH.shape[-1]))


def rank_scaled(
    s_BH: Tensor, weight_HG: Tensor, hyper_BN: Tensor, weight_z: Tensor, bias_z: Tensor
) -> Tensor:
    """``sum_i ((s * a_i) W) * b_i`` with ``[a_1 .. a_d, b_1 .. b_d] = hyper weight_z + bias_z``.

    Args:
        s_BH: the input. weight_HG: W, of G = k H columns; a b_i scales each of the k parts.
        hyper_BN: the state of the hypernetwork. weight_z: [N, 2 d H]. bias_z: [2 d H].

    Returns:
        the sums [B, G].
    """
    return _RankScaled.apply(s_BH, weight_HG, hyper_BN, weight_z, bias_z)


def rank_scaled_by_matrices(
    s_BH: Tensor, weight_HG: Tensor, hyper_BN: Tensor, weight_z: Tensor, bias_z: Tensor
) -> Tensor:
    """The same with every sequence's scaled matrix in memory, [B, H, G]: what the paper could not run."""
    a, b = _vectors(s_BH, hyper_BN, weight_z, bias_z)
    copies = weight_HG.shape[-1] // s_BH.shape[-1]
    scale = torch.einsum("bdi,bdo->bio", a, b).repeat(1, 1, copies)
    return torch.bmm(s_BH.unsqueeze(1), weight_HG * scale).squeeze(1)
