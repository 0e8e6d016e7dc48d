"""Products with a matrix scaled by a sum of outer products, which is never materialised.

``s (W * sum_i a_i b_i^T) = sum_i ((s * a_i) W) * b_i`` (Suarez 2017, equation 8), with vectors a_i and b_i
of each sequence. a_1 is all ones, as when only the output is scaled, and b_1 is given; the others come from a
hypernetwork. The forward pass stores only its operands; the backward pass recomputes vectors and products.
Besides the operands, this takes O(d B (in + out)) numbers, for one step at a time; the scaled matrices would
take O(B in out) at every step.

Shapes: B batch, N width of what the vectors are computed from, H input, G output, K width of a b_i, d terms.
"""

import torch
from torch import Tensor

from rhhn_fairseq.ops.buffers import AUTOCASTING, computed_dtype


class _RankScaled(torch.autograd.Function):
    """See ``rank_scaled``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(s_BH, weight_HG, first_BK, hyper_BN, weight_z, bias_z):
        a, b = _vectors(s_BH.shape[-1], first_BK, hyper_BN, weight_z, bias_z)
        products = (s_BH.unsqueeze(1) * a) @ weight_HG
        return (_in_blocks(products, b) * b.unsqueeze(2)).sum(1).flatten(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        s, weight, first, hyper, weight_z, bias_z = ctx.saved_tensors
        a, b = _vectors(s.shape[-1], first, hyper, weight_z, bias_z)
        g = _in_blocks(gradients[0].unsqueeze(1), b)
        inputs = s.unsqueeze(1) * a
        # Batched gradients have no rule for flatten and unflatten.
        d_products = (g * b.unsqueeze(2)).reshape(*inputs.shape[:2], weight.shape[1])
        db = (g * _in_blocks(inputs @ weight, b)).sum(2)
        d_inputs = d_products @ weight.mT
        ds = (d_inputs * a).sum(1)
        d_weight = inputs.reshape(-1, s.shape[1]).mT @ d_products.reshape(-1, weight.shape[1])
        da = d_inputs[:, 1:] * s.unsqueeze(1)
        dz = torch.cat(
            [part.reshape(len(part), part.shape[1] * part.shape[2]) for part in (da, db[:, 1:])], dim=1
        )
        return ds, d_weight, db[:, 0], dz @ weight_z.mT, hyper.mT @ dz, dz.sum(0)


def _vectors(
    H: int, first_BK: Tensor, hyper_BN: Tensor, weight_z: Tensor, bias_z: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns a [B, d, H] and b [B, d, K]."""
    K = first_BK.shape[-1]
    z, terms = torch.addmm(bias_z, hyper_BN, weight_z), len(bias_z) // (H + K)
    a, b = z.split((terms * H, terms * K), dim=-1)
    a, b = a.unflatten(-1, (terms, H)), b.unflatten(-1, (terms, K))
    return torch.cat((torch.ones_like(a[:, :1]), a), 1), torch.cat((first_BK.unsqueeze(1), b), 1)


def _in_blocks(products_BdG: Tensor, b_BdK: Tensor) -> Tensor:
    """Views products [B, d, G] as [B, d, G / K, K]: the same b_i scales every block."""
    G, K = products_BdG.shape[-1], b_BdK.shape[-1]
    return products_BdG.reshape(*products_BdG.shape[:-1], G // K, K)


def rank_scaled(
    s_BH: Tensor, weight_HG: Tensor, first_BK: Tensor, hyper_BN: Tensor, weight_z: Tensor, bias_z: Tensor
) -> Tensor:
    """``(s W) * b_1 + sum_i ((s * a_i) W) * b_i``, ``[a_2 .. a_d, b_2 .. b_d] = hyper weight_z + bias_z``.

    Args:
        s_BH: the input. weight_HG: W; each b_i scales all its G / K blocks of columns.
        first_BK: b_1.
        hyper_BN: the output of the hypernetwork. weight_z: [N, (d - 1) (H + K)]. bias_z: [(d - 1) (H + K)].

    Returns:
        the sums [B, G].
    """
    operands = [s_BH, weight_HG, first_BK, hyper_BN, weight_z, bias_z]
    if s_BH.device.type in AUTOCASTING and torch.is_autocast_enabled(s_BH.device.type):
        dtype = computed_dtype(s_BH.device, s_BH.dtype)
        operands = [tensor.to(dtype) for tensor in operands]
        # On a GPU, autocast would make sums float32, and so the gradients that the backward multiplies.
        with torch.autocast(s_BH.device.type, enabled=False):
            return _RankScaled.apply(*operands)
    return _RankScaled.apply(*operands)


def scaling_matrices(first_BK: Tensor, hyper_BN: Tensor, weight_z: Tensor, bias_z: Tensor, H: int) -> Tensor:
    """Returns the scale of W, ``1 b_1^T + a_2 b_2^T + ... + a_d b_d^T``, [B, H, K]; see ``rank_scaled``."""
    a, b = _vectors(H, first_BK, hyper_BN, weight_z, bias_z)
    return torch.einsum("bdi,bdo->bio", a, b)
