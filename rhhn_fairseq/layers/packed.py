"""Packed sequences of very different lengths, run without padding them all to the longest.

Shapes: T time, B batch, C input, N steps of all packed sequences. A segment has K steps of the R longest
sequences, of which at least half exist.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.ops.loop import Noise, State


class Segment(NamedTuple):
    """Some steps: those from ``start`` to ``stop`` of ``R`` sequences, which are ``data`` of the packed ones.

    mask_KR: where steps exist; None if all do. places: those of them among all, for ``index_select``.
    """

    start: int
    stop: int
    R: int
    data: slice
    mask_KR: Tensor | None
    places: Tensor | None


class Packed:
    """Where the steps of a PackedSequence lie.

    Args:
        sizes_T: how many sequences have each step, on the CPU; they never grow.
        device: of the data.

    Attributes:
        steps, rows: the step and the sequence of each packed one, [N].
    """

    def __init__(self, sizes_T: Tensor, device: torch.device):
        self.sizes_T, self.device, self.sizes = sizes_T, device, sizes_T.tolist()
        self.T, self.B = len(self.sizes), self.sizes[0]
        mask_TB = torch.arange(self.B, device=sizes_T.device) < sizes_T.unsqueeze(1)
        self.steps, self.rows = (place.to(device) for place in mask_TB.nonzero(as_tuple=True))
        cuts = [0]
        if self.T * self.B > 2 * len(self.rows):
            for t, size in enumerate(self.sizes):
                if 2 * size < self.sizes[cuts[-1]]:
                    cuts.append(t)
        self.segments = [self._segment(*cut) for cut in zip(cuts, [*cuts[1:], self.T], strict=True)]

    def _segment(self, start: int, stop: int) -> Segment:
        R, first = self.sizes[start], sum(self.sizes[:start])
        sizes_K = self.sizes_T[start:stop]
        data = slice(first, first + int(sizes_K.sum()))
        if R == self.sizes[stop - 1]:
            return Segment(start, stop, R, data, None, None)
        # torch keeps the sizes on the CPU, so nothing waits for a device here.
        mask_KR = torch.arange(R, device=sizes_K.device) < sizes_K.unsqueeze(1)
        places = mask_KR.flatten().nonzero().squeeze(1).to(self.device)
        return Segment(start, stop, R, data, mask_KR.to(self.device), places)

    def run(
        self,
        cell: Cell,
        call: Callable,
        reverse: bool,
        x_N1C: Tensor,
        state: State | None,
        mask: None,
        noise: None,
        resets_TB: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Runs a cell over all sequences, from their ends if reversed.

        Args:
            call: the cell, or the cell with other weights.

        Returns:
            the outputs [N, 1, ·], and the state after each sequence's last step.
        """
        segments = self.segments
        if reverse and cell.begins and state is None:
            # A state tells the sequences that begin in a later segment from no others.
            segments = [self._segment(0, self.T)]
        outputs, noisy = [], cell.training and len(segments) > 1
        # Masks of sequences, which are those without steps, are the same in all segments.
        once = cell.sample_noise(2, self.B, self.device) if noisy else {}
        once = {name: draw for name, draw in once.items() if len(draw) == 1}
        for segment in reversed(segments) if reverse else segments:
            R, mask_KR, places = segment.R, segment.mask_KR, segment.places
            K, x = segment.stop - segment.start, x_N1C[segment.data].squeeze(1)
            drawn = cell.sample_noise(K, R, self.device) if noisy else None
            if drawn is not None:
                drawn |= {name: draw[:, :R] for name, draw in once.items()}
            if places is not None:
                x = x.new_zeros(K * R, x.shape[-1]).index_copy(0, places, x)
            resets = None if resets_TB is None else resets_TB[segment.start : segment.stop, :R]
            if resets is not None and mask_KR is not None:
                resets = resets & mask_KR
            start = None if state is None else tuple(entry[:R] for entry in state)
            arguments = x.unflatten(0, (K, R)), start, mask_KR, drawn, resets
            y, after = run_reversed(call, *arguments) if reverse else call(*arguments)
            if R < self.B:
                before = cell.zero_state(self.B, y.device, y.dtype) if state is None else state
                after = tuple(torch.cat((new, old[R:])) for new, old in zip(after, before, strict=True))
            state, y = after, y.flatten(0, 1)
            outputs.append(y if places is None else y.index_select(0, places))
        assert state is not None
        return torch.cat(outputs[::-1] if reverse else outputs).unsqueeze(1), state


def run_reversed(
    call: Callable, x_TBC: Tensor, state: State | None, mask_TB: Tensor | None, noise: Noise | None, _=None
) -> tuple[Tensor, State]:
    """Calls a cell on a text read backwards; returns its outputs in the text's order, and the last state.

    Padding on either side is skipped.
    """
    mask = None if mask_TB is None else mask_TB.flip(0)
    y, final = call(x_TBC.flip(0), state, mask, noise)
    return y.flip(0), final
