"""Regularisers of recurrent networks, as functions of masks that were drawn beforehand.

Shapes: T time, B batch, H hidden. A drawn mask is a bool tensor, [B, H] for one time step or
[1, B, H] for a whole sequence; ``None`` stands for evaluation.
"""

import torch
from torch import Tensor


def draw_mask(shape, probability: float, device, generator=None) -> Tensor:
    """Draws a bool tensor of ``shape`` that is true with ``probability``."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        # ``vmap`` cannot fill a tensor that all samples share with different numbers.
        return torch.rand(shape, device=device, generator=generator) < probability
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    return mask.bernoulli_(probability, generator=generator)


def dropout(x: Tensor, rate: float, keep_mask: Tensor | None) -> Tensor:
    """Applies inverted dropout with a given mask: kept values are scaled by ``1 / (1 - rate)``.

    On the update of a cell, this is Semeniuta et al. 2016 (arXiv 1603.05118). On the recurrent input, with
    one mask for the whole sequence, it is Gal and Ghahramani 2016 (arXiv 1512.05287).
    """
    if keep_mask is None or rate == 0.0:
        return x
    return x * keep_mask * (1.0 / (1.0 - rate))


def zoneout(previous: Tensor, new: Tensor, rate: float, keep_previous: Tensor | None) -> Tensor:
    """Keeps each unit's previous value where the mask says so; without a mask, the expectation.

    Krueger et al. 2016 (arXiv 1606.01305), equation 4.
    """
    if rate == 0.0:
        return new
    if keep_previous is None:
        return new + rate * (previous - new)
    return torch.where(keep_previous, previous, new)


def lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """Returns ``start + weight (end - start)`` in the widest of their types, which differ under autocast."""
    if start.dtype == end.dtype == weight.dtype:
        return torch.lerp(start, end, weight)
    dtype = torch.promote_types(torch.promote_types(start.dtype, end.dtype), weight.dtype)
    return torch.lerp(start.to(dtype), end.to(dtype), weight.to(dtype))


def detach_by_coin(h_BH: Tensor, coin: Tensor | None) -> Tensor:
    """Stops the gradient through ``h_BH`` where ``coin`` is true, without a branch or a synchronisation.

    ``coin`` is [1, 1], one for the whole batch: h-detach of Kanuparthi et al. 2019, algorithm 1.
    """
    if coin is None:
        return h_BH
    # The value is h exactly (the difference is zero), the gradient is (1 - coin) times what arrives.
    return h_BH + coin * (h_BH.detach() - h_BH)


def sequence_dropout(x_TBC: Tensor, rate: float, training: bool, per_sequence: bool = False) -> Tensor:
    """Applies dropout to the vertical connections of a network, with one mask per step or per sequence.

    Args:
        x_TBC: activations, [T, B, C].
        rate: probability of dropping a unit.
        training: if false, the input is returned unchanged.
        per_sequence: one mask for all time steps (Gal and Ghahramani 2016) instead of one for each.
    """
    if not training or rate == 0.0:
        return x_TBC
    if not per_sequence:
        return torch.nn.functional.dropout(x_TBC, rate, training=True)
    keep = draw_mask((1, *x_TBC.shape[1:]), 1.0 - rate, x_TBC.device)
    return dropout(x_TBC, rate, keep)


LAYER_NORM_EPS = 1e-3
"""Added to the variance; the value of the reference implementation of LN HyperLSTM (supercell)."""


def layer_norm(a_BG: Tensor, gain_G: Tensor, shift_G: Tensor, epsilon: float, gates: int = 1) -> Tensor:
    """Applies layer normalisation to each of ``gates`` equal blocks of ``a_BG`` separately.

    Ba et al. 2016 (arXiv 1607.06450), equation 4, with the biased variance.
    """
    blocks = a_BG.unflatten(-1, (gates, -1))
    normal = torch.nn.functional.layer_norm(blocks, blocks.shape[-1:], eps=epsilon)
    return torch.addcmul(shift_G, normal.flatten(-2), gain_G)
