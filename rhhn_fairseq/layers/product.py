"""The matrix product that cells and layers use."""

import torch
from torch import Tensor


def affine(x: Tensor, weight_KN: Tensor, add: Tensor | None = None) -> Tensor:
    """``x @ weight + add``; without a gradient, products of a few rows by ``kernels.few_rows``.

    Args:
        x: [..., K]. weight_KN: [K, N].
        add: [N], or [M, N] for an x of M rows; None for nothing.
    """
    if not torch.is_grad_enabled():
        # Only here, because cells are imported before the kernels that run them.
        from rhhn_fairseq.kernels import few_rows

        found = few_rows.product(x, weight_KN, add)
        if found is not None:
            return found
    if add is None:
        return x @ weight_KN
    if x.dim() == 2:
        return torch.addmm(add, x, weight_KN)
    return torch.addmm(add, x.reshape(-1, x.shape[-1]), weight_KN).view(*x.shape[:-1], -1)
