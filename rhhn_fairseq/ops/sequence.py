"""Shared parts of the operations over a sequence: products around the loop over time, and noise.

Shapes: T time, B batch, H hidden, G columns of a weight.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.buffers import state_dtype
from rhhn_fairseq.ops.loop import Noise, steps_with
from rhhn_fairseq.ops.matmul.gemm import mm

BLOCK_ROWS = 1536
"""Number of rows beyond which a product over steps gets no faster."""


Run = Callable[[int, int], None]
"""Runs steps, from the first to the one before the second number."""


class Resets:
    """Where the states of sequences start anew from zeros, within a pass over their steps.

    Between two resets the steps run as they would without. A function that runs steps and has the attribute
    ``clears`` does this itself.

    Args:
        resets_TB: bool, true before the steps at which a state starts anew; None for nowhere. Those of step 0
            are left to the caller.
    """

    def __init__(self, resets_TB: Tensor | None):
        self.resets_TB = resets_TB
        self.steps = set(() if resets_TB is None else steps_with(resets_TB)) - {0}

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        cuts = sorted({start, stop, *(t for t in self.steps if start < t < stop)})
        return zip(cuts[:-1], cuts[1:], strict=True)

    def _clear(self, t: int, tensors: Sequence[Tensor | None]) -> None:
        if t in self.steps:
            assert self.resets_TB is not None
            begins_B1 = self.resets_TB[t].unsqueeze(-1)
            for tensor in tensors:
                if tensor is not None:
                    tensor.masked_fill_(begins_B1, 0.0)

    def forward(self, run: Run, start: int, stop: int, states: Sequence[Tensor]) -> None:
        """Runs steps forward.

        Args:
            states: tensors [T, B, ·] of the states after each step, which the next step reads. They are
                cleared before a reset.
        """
        if not self.steps or hasattr(run, "clears"):
            return run(start, stop)
        for first, last in self._spans(start, stop):
            self._clear(first, [state[first - 1] for state in states])
            run(first, last)

    def backward(self, run: Run, start: int, stop: int, gradients: Sequence[Tensor | None]) -> None:
        """Runs steps backward; clears the gradients of the state, [B, ·], after those that begin anew."""
        if hasattr(run, "clears"):
            return run(start, stop)
        for first, last in reversed(list(self._spans(start, stop))):
            run(first, last)
            self._clear(first, gradients)


def previous_states(first: Tensor, rest_TBH: Tensor) -> list[Tensor]:
    """Returns views of the state that each step reads: the initial one, then that after each but the last."""
    return [first, *rest_TBH[:-1].unbind(0)]


def operand_blocks(
    first: Tensor, rest_TBH: Tensor, gal_BH: Tensor | None, steps: slice = slice(None)
) -> list[Tensor]:
    """Returns the states as a matrix read them at some steps, in contiguous blocks [K, B, H]."""
    start, stop, _ = steps.indices(len(rest_TBH))
    blocks = [rest_TBH[start - 1 : stop - 1]] if start else [first.unsqueeze(0), rest_TBH[: stop - 1]]
    return blocks if gal_BH is None else [block * gal_BH for block in blocks]


def block_steps(T: int, B: int, operands: torch.dtype, states: torch.dtype) -> int:
    """Returns for how many steps a backward pass keeps gradients that only the weights' gradients need.

    With several blocks, the weights' gradients accumulate in the operands' type, which must be the states'.
    """
    blocks = T * B // BLOCK_ROWS if operands == states else 1
    return -(-T // max(1, blocks))


def weight_gradient(
    blocks: list[Tensor], du_TBG: Tensor, gemm: str, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """Returns the gradient [H, G] of a weight from its inputs (``operand_blocks``) and the gradients of the
    products.

    Args:
        gemm: implementation of the products, one of ``policy.GEMMS``.
        out: where the gradient is written, or added if ``add`` is true; None for a new tensor.
    """
    gradients = du_TBG.split([len(block) for block in blocks])
    for block, du in zip(blocks, gradients, strict=True):
        if len(block):
            rows = block.flatten(0, 1).t()
            out = mm(rows, du.flatten(0, 1), out, out if add else None, gemm)
            add = True
    if out is None:
        raise ValueError("a weight that read nothing has no gradient")
    return out


def expand_noise(noise: Noise | None, name: str, *shape: int) -> Tensor | None:
    """Returns one entry of a pass's noise, expanded to exactly this shape; None if there is none.

    Raises:
        UsageError: its shape differs in more than a leading or second size of 1.
    """
    draw = None if noise is None else noise.get(name)
    if draw is None or tuple(draw.shape) == shape:
        return draw if draw is None or draw.is_contiguous() else draw.contiguous()
    fits = len(draw.shape) == len(shape) and draw.shape[-1] == shape[-1]
    if not fits or any(given not in (1, size) for given, size in zip(draw.shape, shape, strict=True)):
        raise UsageError(
            f"noise {name!r} has shape {tuple(draw.shape)}, this operation reads {shape} "
            "(RHHN_KERNEL=reference takes every shape that a step can use)"
        )
    return draw.expand(shape).contiguous()


class Masks(NamedTuple):
    """Padding and noise of a pass, see ``buffers``; every field is optional, and no network has all."""

    mask: Tensor | None = None
    first: Tensor | None = None
    gal: Tensor | None = None
    keep: Tensor | None = None
    zone_h: Tensor | None = None
    zone_c: Tensor | None = None
    share: Tensor | None = None
    c_scale: Tensor | None = None
    resets: Tensor | None = None

    def of(self, kind: type) -> dict[str, Tensor | None]:
        """Returns by name those that buffers of a kind have."""
        return {name: getattr(self, name) for name in self._fields if hasattr(kind, name)}


def gather_masks(
    mask_TB: Tensor | None,
    noise: Noise | None,
    gal_rate: float,
    g_TBG: Tensor,
    layers: int | None = None,
    first_TB1: Tensor | None = None,
) -> Masks:
    """Returns the padding and the noise that a cell drew, in the form that the operations take.

    Args:
        noise: entries ``gal``, ``update``, ``zoneout``, ``zoneout_c``, ``h_detach``, ``c_detach``,
            ``resets``.
        gal_rate: rate of Gal dropout. g_TBG: sums of the gates or projection of the input.
        layers: of a highway network, G = 2 H; None for an LSTM, G = 4 H.
        first_TB1: where layer 0 of a highway network leaves its bias out.

    Raises:
        UsageError: an entry's shape cannot be expanded to what the operation reads.
    """
    mask_TB, resets_TB = masks_of_positions(mask_TB, noise)
    first = None if first_TB1 is None else first_TB1.squeeze(-1).contiguous()
    if not noise:
        return Masks(mask_TB, first)
    (T, B, G), wide = g_TBG.shape, state_dtype(g_TBG.dtype)
    H = G // 4 if layers is None else G // 2
    once = layers is None and "update" in noise and len(noise["update"]) == 1
    return Masks(
        mask_TB,
        first,
        gal_mask(noise, gal_rate, B, H, g_TBG.dtype),
        expand_noise(noise, "update", 1 if once else T, B, (layers or 1) * H),
        expand_noise(noise, "zoneout", T, B, H),
        expand_noise(noise, "zoneout_c", T, B, H),
        gradient_share(noise, "h_detach", T, wide),
        gradient_share(noise, "c_detach", T, wide),
        resets_TB,
    )


def masks_of_positions(mask_TB: Tensor | None, noise: Noise | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns the padding and the resets of a pass, [T, B] and contiguous.

    With resets there is always a mask, so that outputs and states have separate buffers.
    """
    resets = None if noise is None else noise.get("resets")
    if resets is not None:
        resets = resets.squeeze(-1).contiguous()
        mask_TB = torch.ones_like(resets) if mask_TB is None else mask_TB
    return mask_TB if mask_TB is None else mask_TB.contiguous(), resets


def gradient_share(noise: Noise | None, name: str, T: int, dtype: torch.dtype) -> Tensor | None:
    """Returns each step's factor of a gradient, [T], from the coins of h-detach or c-detach."""
    coin = expand_noise(noise, name, T, 1, 1)
    return None if coin is None else 1.0 - coin.flatten().to(dtype)


def gal_mask(noise: Noise | None, rate: float, B: int, H: int, dtype: torch.dtype) -> Tensor | None:
    """Returns Gal dropout's mask of a sequence, scaled, [B, H]; None if there is none."""
    mask = expand_noise(noise, "gal", 1, B, H)
    return None if mask is None else mask[0].to(dtype) * (1.0 / (1.0 - rate))


def through_recurrence(dh: Tensor, gal_BH: Tensor | None, share_T: Tensor | None, t: int) -> None:
    """Turns the gradient of a matrix's input at step t into that of the state, in place."""
    if gal_BH is not None:
        dh.mul_(gal_BH)
    if share_T is not None:
        dh.mul_(share_T[t])


def or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Returns a copy of a gradient, or zeros if it is None."""
    if gradient is None:
        return torch.zeros_like(like)
    return gradient.clone(memory_format=torch.contiguous_format)
