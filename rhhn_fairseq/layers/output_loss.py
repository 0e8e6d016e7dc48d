"""Label-smoothed cross-entropy computed from an output layer's input, a few positions at a time.

The logits of a batch, a number for every position and symbol, are the largest tensor of a translation model,
and fairseq's criterion keeps several of them. Here a chunk's logits live only until its share of the loss and
of every gradient is computed, so the forward pass computes both the loss and the gradients.

Shapes: P positions, H width, V symbols.
"""

import torch
from torch import Tensor

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.buffers import computed_dtype
from rhhn_fairseq.ops.matmul.gemm import mm, select_gemm

FLOAT16_SCALE = 8.0
"""Factor that temporarily scales the gradients of logits in float16.

Probabilities below 6e-5 lose digits in float16, and a loss scaler acts too late to keep them; but a sum over
a chunk must not overflow either.
"""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_PH, weight_VH, bias_V, target_P, real_P, smoothing, chunk, dtype, grad_enabled):
        ctx.types = [tensor.dtype for tensor in (y_PH, weight_VH, bias_V)]
        # ``needs_input_grad`` does not know of ``torch.no_grad``, and in here gradients are always off.
        learns = grad_enabled and any(ctx.needs_input_grad[:3])
        y_PH, weight_VH, bias_V = (operand.to(dtype) for operand in (y_PH, weight_VH, bias_V))
        # The operands already have the type that autocast would choose.
        with torch.autocast(y_PH.device.type, enabled=False):
            sums, gradients = _chunks(y_PH, weight_VH, bias_V, target_P, real_P, smoothing, chunk, learns)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    def backward(ctx, factor, _):
        if torch.is_grad_enabled():
            raise UsageError(
                "the gradients of linear_cross_entropy cannot be differentiated; with create_graph=True, "
                "compute the logits and torch.nn.functional.cross_entropy"
            )
        # Multiplied first: a loss scaler's factor may lift what the cast would lose.
        pieces = zip(ctx.saved_tensors, ctx.types, strict=True)
        return *((tensor * factor).to(dtype) for tensor, dtype in pieces), *(None,) * 6


def _chunks(y_PH, weight_VH, bias_V, target_P, real_P, smoothing, chunk, learns):
    """Returns the three sums of ``linear_cross_entropy``, and the gradients of y, weight and bias.

    All are in float32 at least; there are no gradients unless something ``learns``.
    """
    V = len(weight_VH)
    each, picked = smoothing / (V - 1), 1.0 - smoothing - smoothing / (V - 1)
    wide = torch.promote_types(y_PH.dtype, torch.float32)
    scale = FLOAT16_SCALE if y_PH.dtype == torch.float16 else 1.0
    sums = y_PH.new_zeros(3, dtype=wide)
    operands = (y_PH, weight_VH, bias_V) if learns else ()
    gradients = [tensor.new_zeros(tensor.shape, dtype=wide) for tensor in operands]
    dy, dweight, dbias = gradients if learns else [sums] * 3
    gemm, bias_V = select_gemm(y_PH.dtype, y_PH.device), bias_V.contiguous()
    pieces = (tensor.split(chunk) for tensor in (y_PH, target_P, real_P, dy if learns else y_PH))
    for y, target, real, dy_chunk in zip(*pieces, strict=True):
        logits = mm(y, weight_VH.t(), None, bias_V, gemm).to(wide)
        total = logits.logsumexp(dim=-1)
        of_target = logits.gather(1, target.unsqueeze(1)).squeeze(1)
        nll = (total - of_target) * real
        smooth = (V * total - logits.sum(dim=-1)) * real
        correct = ((logits.argmax(dim=-1) == target) * real).sum()
        sums += torch.stack([picked * nll.sum() + each * smooth.sum(), nll.sum(), correct])
        if not learns:
            continue
        # The terms of the two losses add up so that the softmax has the factor 1.
        gradient = logits.sub_(total.unsqueeze(1)).exp_().sub_(each)
        gradient.scatter_add_(1, target.unsqueeze(1), torch.full_like(nll, -picked).unsqueeze(1))
        gradient = gradient.mul_((real * scale).unsqueeze(1))
        dbias += gradient.sum(dim=0)
        if wide == y.dtype:
            mm(gradient, weight_VH, dy_chunk, None, gemm)
            mm(gradient.t(), y, dweight, dweight, gemm)
        else:
            gradient = gradient.to(y.dtype)
            dy_chunk.copy_(gradient @ weight_VH)
            dweight += gradient.t() @ y
    if not learns:
        return sums, []
    return sums, [tensor if scale == 1.0 else tensor.div_(scale) for tensor in gradients]


def linear_cross_entropy(
    y_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor,
    target_P: Tensor,
    real_P: Tensor,
    smoothing: float = 0.0,
    chunk: int = 512,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sums over positions of the cross-entropy of ``softmax(y W^T + b)``, in nats.

    Smoothed as in fairseq's ``label_smoothed_cross_entropy``: the target has ``1 - smoothing`` of the weight,
    every other symbol ``smoothing / (V - 1)``.

    Args:
        target_P: indices. real_P: bool, positions that count. chunk: positions at a time.

    Returns:
        the smoothed loss, which has gradients; the plain loss; how many targets have the highest probability.

    Raises:
        UsageError: by the backward pass, with ``create_graph=True``.
    """
    dtype = computed_dtype(y_PH.device, y_PH.dtype)
    real = real_P.to(torch.promote_types(dtype, torch.float32))
    options = (smoothing, chunk, dtype, torch.is_grad_enabled())
    loss, sums = _LinearCrossEntropy.apply(y_PH, weight_VH, bias_V, target_P, real, *options)
    return loss, sums[1], sums[2]
