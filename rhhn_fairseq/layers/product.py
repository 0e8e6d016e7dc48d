"""The matrix product and the interpolation that cells and layers use."""

import torch
from torch import Tensor


def affine(x: Tensor, weight_KN: Tensor, add: Tensor | None = None) -> Tensor:
    """``x @ weight + add``, by compiled code where that is faster (``kernels.matmul``, ``kernels.few_rows``).

    Args:
        x: [..., K]. weight_KN: [K, N].
        add: [N], or [M, N] for an x of M rows; None for nothing.
    """
    # Only here, because cells are imported before the kernels that run them.
    from rhhn_fairseq.kernels import few_rows, matmul

    if not torch.is_grad_enabled():
        found = few_rows.product(x, weight_KN, add)
        if found is not None:
            return found
    rows = x.reshape(-1, x.shape[-1])
    found = matmul.differentiable(rows, weight_KN, add)
    if found is not None:
        return found.view(*x.shape[:-1], -1)
    if add is None:
        return x @ weight_KN
    return torch.addmm(add, rows, weight_KN).view(*x.shape[:-1], -1)


def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """``start + weight (end - start)`` in the widest of their types, which autocast leaves different."""
    dtype = torch.promote_types(torch.promote_types(start.dtype, end.dtype), weight.dtype)
    return torch.lerp(start.to(dtype), end.to(dtype), weight.to(dtype))
