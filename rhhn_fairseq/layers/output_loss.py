"""Label-smoothed cross-entropy straight from an output layer's input, a few positions at a time.

The logits of a batch, a number for every position and symbol, are the largest tensor of a translation model,
and fairseq's criterion keeps several of them. Here a chunk's logits live only until its share of the loss and
of every gradient is taken, so the loss and the gradients come out of the forward pass together.

Shapes: P positions, H width, V symbols.
"""

import torch
from torch import Tensor

from rhhn_fairseq.kernels.matmul import mm


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_PH, weight_VH, bias_V, target_P, real_P, smoothing, chunk):
        V = len(weight_VH)
        each, picked = smoothing / (V - 1), 1.0 - smoothing - smoothing / (V - 1)
        wide = torch.promote_types(y_PH.dtype, torch.float32)
        sums = y_PH.new_zeros(3, dtype=wide)
        learns = any(ctx.needs_input_grad[:3])
        if learns:
            dy = torch.empty_like(y_PH)
            dweight = torch.zeros_like(weight_VH, dtype=wide)
            dbias = torch.zeros_like(bias_V, dtype=wide)
        parts = (part.split(chunk) for part in (y_PH, target_P, real_P, dy if learns else y_PH))
        for y, target, real, dy_chunk in zip(*parts, strict=True):
            logits = mm(y, weight_VH.t(), add=bias_V).to(wide)
            total = logits.logsumexp(dim=-1)
            of_target = logits.gather(1, target.unsqueeze(1)).squeeze(1)
            nll = (total - of_target) * real
            smooth = (V * total - logits.sum(dim=-1)) * real
            correct = ((logits.argmax(dim=-1) == target) * real).sum()
            sums += torch.stack([picked * nll.sum() + each * smooth.sum(), nll.sum(), correct])
            if not learns:
                continue
            # The shares of the two losses add up so that softmax has the factor 1.
            gradient = logits.sub_(total.unsqueeze(1)).exp_().sub_(each)
            gradient.scatter_add_(1, target.unsqueeze(1), torch.full_like(nll, -picked).unsqueeze(1))
            gradient = gradient.mul_(real.unsqueeze(1))
            dbias += gradient.sum(dim=0)
            gradient = gradient.to(y.dtype)
            mm(gradient, weight_VH, dy_chunk)
            if dweight.dtype == y.dtype:
                mm(gradient.t(), y, dweight, dweight)
            else:
                dweight += gradient.t() @ y
        if learns:
            ctx.save_for_backward(dy, dweight.to(weight_VH.dtype), dbias.to(bias_V.dtype))
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    def backward(ctx, factor, _):
        return *(part * factor.to(part.dtype) for part in ctx.saved_tensors), None, None, None, None


def linear_cross_entropy(
    y_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor,
    target_P: Tensor,
    real_P: Tensor,
    smoothing: float = 0.0,
    chunk: int = 512,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over positions of the cross-entropy of ``softmax(y W^T + b)``, in nats.

    Smoothed as fairseq's ``label_smoothed_cross_entropy``: the target has ``1 - smoothing`` of the weight,
    every other symbol ``smoothing / (V - 1)``.

    Args:
        target_P: indices. real_P: bool, positions that count. chunk: positions at a time.

    Returns:
        the smoothed loss, which has gradients; the plain one; how many targets have the highest probability.
    """
    real = real_P.to(torch.promote_types(y_PH.dtype, torch.float32))
    loss, sums = _LinearCrossEntropy.apply(y_PH, weight_VH, bias_V, target_P, real, smoothing, chunk)
    return loss, sums[1], sums[2]
