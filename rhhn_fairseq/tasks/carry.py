"""The recurrent state that is carried from batch to batch (truncated back-propagation through time)."""

import numpy as np
import torch
from torch import Tensor

from rhhn_fairseq.ops.loop import State


class Carry:
    """The state of one group of lanes between two chunks of its text.

    A task opens it at the chunk of a batch and puts it into the batch's ``net_input``; each model that
    reads the batch calls ``read`` and then ``write``. The models of an ensemble come in the same order
    in every batch, so each finds its own state again.
    """

    def __init__(self, chunk: int = -1, after: State | None = None):
        self.chunk = chunk
        self._start: list[State] = []
        self._after: list[State] = [] if after is None else [after]
        self._read = 0

    @property
    def after(self) -> State:
        """The first model's state after the opened chunk."""
        return (self._after or self._start)[0]

    def open(self, chunk: int) -> "Carry":
        """Moves to ``chunk``; ``read`` then gives the state before it.

        The same chunk may be opened again (a batch that is repeated after an overflow), and chunk 0
        always starts from zeros; otherwise chunks come in order.

        Raises:
            RuntimeError: a chunk was skipped.
        """
        if chunk == 0:
            self._start = []
        elif chunk == self.chunk + 1:
            # A pass that ran out of memory wrote none; fairseq goes on with the next batch.
            self._start = self._after or self._start
        elif chunk != self.chunk:
            raise RuntimeError(f"chunk {chunk} came after chunk {self.chunk}, the batch order is broken")
        self.chunk, self._after, self._read = chunk, [], 0
        return self

    def read(self, device: torch.device | None = None) -> State | None:
        """Returns the next model's state before the current chunk; None for zeros.

        Args:
            device: where the model is. A checkpoint's states are on the CPU.
        """
        self._read += 1
        return tuple(tensor.to(device) for tensor in self._start[self._read - 1]) if self._start else None

    def write(self, state: State) -> None:
        """Stores a model's state after the current chunk, detached from its graph."""
        self._after.append(tuple(tensor.detach() for tensor in state))


def gather_states(carries: list[Carry], world_size: int) -> list[list[Tensor]]:
    """Returns the states of all groups of all workers, in the order of the groups, on the CPU.

    Every worker must call it. Group u W + r is carry u of worker r.
    """
    gathered = []
    for carry in carries:
        if world_size == 1:
            gathered.append([tensor.cpu() for tensor in carry.after])
            continue
        gathered_states = []
        for tensor in carry.after:
            if torch.distributed.get_backend() == "nccl":
                # A checkpoint's states are not on the GPU before the first batch.
                tensor = tensor.cuda()
            copies = [torch.empty_like(tensor) for _ in range(world_size)]
            torch.distributed.all_gather(copies, tensor.contiguous())
            gathered_states.append(copies)
        gathered.extend([tensor[rank].cpu() for tensor in gathered_states] for rank in range(world_size))
    return gathered


def pass_seed(seed: int, update: int, group: int) -> int:
    """Returns the seed for one forward pass: W workers draw what one draws in U = W passes an update."""
    return int(np.random.SeedSequence([seed, update, group]).generate_state(1, np.uint64)[0] >> 1)
