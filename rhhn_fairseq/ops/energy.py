"""Energies of additive attention without storing its hidden layer, as the operation ``rhhn::energy``.

In torch, ``v . tanh(q + k)`` stores A numbers for every pair of a target and a source position, and several
such copies with the gradients: 0.4 GB each for 100 sentences of 49 and 40 pieces and A = 512. The compiled
code keeps a pair's hidden layer in registers and recomputes it in the backward pass.

Shapes: N sentences, R queries of each, S source positions, A width of the hidden layer.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from rhhn_fairseq.ops import native, policy
from rhhn_fairseq.ops.buffers import state_dtype
from rhhn_fairseq.ops.library import differentiate, operation
from rhhn_fairseq.ops.matmul import gemm


def energies(q_NRA: Tensor, k_NSA: Tensor, v_A: Tensor, mask_NS: Tensor) -> Tensor:
    """Returns ``v . tanh(q + k)`` for every pair, [N, R, S], minus infinity where the mask is false.

    The result is float32, or float64 for float64 operands, even if the operands are half precision: a softmax
    over a long source needs it.
    """
    wide = state_dtype(q_NRA.dtype)
    (N, S, A), R = k_NSA.shape, q_NRA.shape[1]
    # Torch rejects, or broadcasts, shapes that do not fit.
    fits = q_NRA.shape == (N, R, A) and v_A.shape == (A,) and mask_NS.shape == (N, S)
    if fits and _is_compiled(q_NRA) and q_NRA.dtype == k_NSA.dtype:
        operands = (operand.contiguous() for operand in (q_NRA, k_NSA, v_A.to(wide), mask_NS))
        return energy(*operands)
    hidden_NRSA = (q_NRA.unsqueeze(2) + k_NSA.unsqueeze(1)).tanh_()
    return (hidden_NRSA @ v_A).to(wide).masked_fill(~mask_NS.unsqueeze(1), float("-inf"))


def _is_compiled(q_NRA: Tensor) -> bool:
    """Whether the compiled code runs; like a cell's, it has gradients, but no further derivatives."""
    is_built = native.IS_BUILT if torch.compiler.is_dynamo_compiling() else native.library() is not None
    if q_NRA.device.type != "cpu" or q_NRA.dtype not in native.DTYPES or not is_built:
        return False
    plain = torch.compiler.is_compiling() or gemm.transformation() is None
    # ONNX has no operation of this package.
    return plain and policy.current().kernel != "reference" and not torch.onnx.is_in_onnx_export()


@operation("rhhn::energy")
def energy(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """See ``energies``. All operands are contiguous and on the CPU; v has the state type."""
    e = v.new_empty(q.shape[0], q.shape[1], k.shape[1])
    native.energy(dict(q=q, k=k, v=v, mask=mask, e=e))
    return e


@torch.library.register_fake(energy)
def _(q, k, v, mask):
    return v.new_empty(q.shape[0], q.shape[1], k.shape[1])


@operation("rhhn::energy_backward")
def energy_backward(
    gradients: Sequence[Optional[Tensor]],
    kept: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
) -> list[Tensor]:
    """Returns the gradients of q, k and v from that of the energies."""
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dv = v.new_zeros(torch.get_num_threads(), len(v))
    (de,) = (gradient.contiguous() for gradient in gradients if gradient is not None)
    native.energy(dict(q=q, k=k, v=v, mask=mask, de=de, dq=dq, dk=dk, dv=dv))
    return [dq, dk, dv.sum(0)]


differentiate(energy, energy_backward, outputs=1, differentiable=3, keep=lambda inputs, _: (inputs, []))
