"""Cuts a stream of symbols into batches: contiguous lanes, overlapping or random windows.

A stream of N symbols has N targets. The input before target i is symbol i - 1; before target 0 it is
``first_input``. So the stream is shifted before it is cut, and the last target of a chunk is scored like
every other.

Shapes: B lanes or windows in a batch, T symbols in a chunk.
"""

from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.data.text.vocabulary import PAD


@dataclass(frozen=True)
class Batch:
    """One batch of dictionary indices.

    Attributes:
        inputs: int64 [B, T], PAD where ``mask`` is false.
        targets: int64 [B, T], PAD where nothing is scored: padding, and symbols read as context only.
        mask: bool [B, T], true at real positions; None if all are.
        chunk: position of the batch in its lanes: the state is carried from chunk to chunk and starts
            from zero at chunk 0. Windows are all chunk 0.
        group: which of the groups of lanes (or, for windows, which share of the update) this is.
    """

    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray | None
    chunk: int
    group: int


class _Cutter:
    """Reads ranges of positions from a stream; lanes and windows share it."""

    def __init__(self, stream: np.ndarray, first_input: int):
        self.stream, self.first_input = stream, first_input

    def read(self, start_B, score_B, end_B, T: int, chunk: int, group: int) -> Batch:
        """Reads T positions from ``start``, scoring those in [score, end) of each row."""
        position = start_B[:, None] + np.arange(T)
        real = position < end_B[:, None]
        # Columns that are padding in every row cost time and change nothing; one is always kept.
        T = max(1, int(real.any(axis=0).sum()))
        position, real = position[:, :T], real[:, :T]
        safe = np.minimum(position, len(self.stream) - 1)
        targets = self.stream[safe].astype(np.int64)
        inputs = self.stream[safe - 1].astype(np.int64)
        inputs[safe == 0] = self.first_input
        inputs[~real] = PAD
        targets[~real | (position < score_B[:, None])] = PAD
        return Batch(inputs, targets, None if real.all() else real, chunk, group)


class Lanes(_Cutter):
    """The stream cut into lanes of equal length (within one symbol), read side by side in chunks of T.

    Args:
        stream: dictionary indices [N].
        first_input: the index read before the first target.
        lanes: total number of lanes, a multiple of ``groups``.
        groups: lanes are dealt to this many groups in order; batch i is chunk i // groups of group
            i % groups. With W workers and update frequency U there are W U groups, so that W workers
            see exactly what one worker sees with U = W.
        T: symbols in a chunk.
        context: symbols before each lane that are read but not scored.
    """

    def __init__(self, stream, first_input, lanes: int, groups: int, T: int, context: int = 0):
        super().__init__(stream, first_input)
        bounds = np.arange(lanes + 1, dtype=np.int64) * len(stream) // lanes
        self.scored_from, self.end = bounds[:-1], bounds[1:]
        self.start = np.maximum(self.scored_from - context, 0)
        self.groups, self.lanes_in_group, self.T = groups, lanes // groups, T
        self.chunks = -(-int((self.end - self.start).max()) // T)

    def __len__(self):
        return self.chunks * self.groups

    def batch(self, i: int) -> Batch:
        """Returns batch ``i`` of the epoch."""
        chunk, group = divmod(i, self.groups)
        rows = slice(group * self.lanes_in_group, (group + 1) * self.lanes_in_group)
        start = self.start[rows] + chunk * self.T
        return self.read(start, self.scored_from[rows], self.end[rows], self.T, chunk, group)


class Windows(_Cutter):
    """Overlapping windows of ``length`` symbols, each read from the zero state; every target is scored once.

    The first ``context`` symbols of a window are context only, except in the first window, which has
    none before it and is scored from its start.

    Args:
        stream, first_input: as for ``Lanes``. context: less than ``length``. B: windows in a batch.
    """

    def __init__(self, stream, first_input, length: int, context: int, B: int):
        super().__init__(stream, first_input)
        self.length, self.context, self.B = length, context, B
        self.stride = length - context
        self.count = max(1, -(-(len(stream) - context) // self.stride))

    def __len__(self):
        return -(-self.count // self.B)

    def batch(self, i: int) -> Batch:
        """Returns batch ``i``."""
        window = np.arange(i * self.B, min((i + 1) * self.B, self.count), dtype=np.int64)
        start = window * self.stride
        score = np.where(window == 0, 0, start + self.context)
        end = np.minimum(start + self.length, len(self.stream))
        return self.read(start, score, end, self.length, 0, 0)


class RandomWindows(_Cutter):
    """Windows drawn at random, each read from the zero state and scored whole, as in Suarez's repository.

    An epoch has as many windows as fit into the stream in a whole number of updates. Batch ``b`` of
    epoch ``e`` is number ``e * len(self) + b``, and is drawn from (seed, e, b) alone.

    Args:
        stream, first_input: as for ``Lanes``. length: symbols in a window. B: windows in a batch.
        groups: batches in an update, over all workers. seed: of the draws.
    """

    def __init__(self, stream, first_input, length: int, B: int, groups: int, seed: int):
        super().__init__(stream, first_input)
        self.length, self.B, self.groups, self.seed = length, B, groups, seed
        self.count = len(stream) // (length * B * groups) * groups

    def __len__(self):
        return self.count

    def batch(self, i: int) -> Batch:
        """Returns batch ``i % len(self)`` of epoch ``i // len(self)``."""
        epoch, b = divmod(i, self.count)
        draw = np.random.default_rng([self.seed, epoch, b])
        start = draw.integers(0, len(self.stream) - self.length + 1, size=self.B)
        return self.read(start, start, start + self.length, self.length, 0, b % self.groups)
