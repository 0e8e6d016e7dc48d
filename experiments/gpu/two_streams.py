"""A HyperRHN's hypernetwork and main network on two streams, a chunk apart.

The hypernetwork reads x and its own state only. Today it runs over the whole sequence before the main network
begins, so its L T small products are added to the time. Here it is the first stage of a pipeline and the main
network the second, and the hypervectors of a chunk are one batched product. Autograd runs the backward pass
of each operation on the stream of its forward pass and orders the streams itself, so the backward pass needs
no code. On a CPU there are no streams: the same chunks run in turn.

Measured on an H200, 7 x 1000/128, T = 100, B = 128, bfloat16: as one CUDA graph 1.37 times today's speed and
1.22 times that of today's pass as one graph; with a graph for each call of each chunk 1.07 times at best.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends
from rhhn_fairseq.ops.buffers import state_dtype
from rhhn_fairseq.ops.loop import Noise, State

Tensors = Sequence[Tensor | None]


class Lanes:
    """``count`` streams for work that may run side by side; on a CPU, none."""

    def __init__(self, count: int, device: torch.device):
        self.streams = [torch.cuda.Stream(device) for _ in range(count if device.type == "cuda" else 0)]

    def on(self, lane: int):
        """Makes a lane's stream the current one inside a ``with`` block."""
        return torch.cuda.stream(self.streams[lane]) if self.streams else contextlib.nullcontext()


def leave(tensors: Tensors) -> tuple[Tensors, torch.cuda.Event | None]:
    """Leaves the current stream's tensors for others; on a GPU with the event after which they are there."""
    on_gpu = any(tensor is not None and tensor.is_cuda for tensor in tensors)
    return tensors, torch.cuda.current_stream().record_event() if on_gpu else None


def take(left: tuple[Tensors, torch.cuda.Event | None]) -> Tensors:
    """Returns what another stream left, for use on the current one, which waits until it is complete."""
    tensors, event = left
    if event is not None:
        stream = torch.cuda.current_stream()
        stream.wait_event(event)
        for tensor in tensors:
            # Whoever frees it, its memory must not be used again before this stream has read it.
            if tensor is not None:
                tensor.record_stream(stream)
    return tensors


Stage = Callable[[Tensors, State], tuple[Tensors, State]]
"""Maps a chunk and the state before it to what the next stage reads and the state after it."""


def pipeline(
    stages: Sequence[Stage], tensors: Tensors, starts: Sequence[State], chunk: int, lanes: Lanes
) -> tuple[list[Tensors], list[State]]:
    """Runs chunks of tensors [T, ...] through all stages, each on its lane and from its start.

    Work is issued wave by wave, so that no lane waits until all chunks of another are issued, and the
    backward pass, in the reverse order, is a wave too. The first tensor has T steps; None, and a tensor of
    length 1, go to every chunk. Returns what the last stage left, by tensor, and the last state of each.
    """
    count = -(-len(tensors[0]) // chunk)
    # ``split`` has one backward node; indexing would fill a gradient as large as the sequence for each chunk.
    pieces = [[t] * count if t is None or len(t) == 1 else t.split(chunk) for t in tensors]
    done = [leave(piece) for piece in zip(*pieces, strict=True)]
    states = [leave(state) for state in starts]
    for wave in range(count + len(stages) - 1):
        for lane, stage in enumerate(stages):
            if 0 <= (k := wave - lane) < count:
                with lanes.on(lane):
                    item, state = stage(take(done[k]), take(states[lane]))
                    done[k], states[lane] = leave(item), leave(state)
    return list(zip(*map(take, done), strict=True)), [take(state) for state in states]


def starts_of(cells: Sequence[Cell], x_TBC: Tensor, state: State | None) -> list[State]:
    """Returns each cell's first state, in the type of the arithmetic, so that no chunk's end rounds it."""
    # Where padding comes first, the first chunk cannot know the first step.
    if any(cell.begins for cell in cells):
        raise UsageError('first_step="skip" is not supported in chunks')
    wide, given = state_dtype(x_TBC.dtype), iter(state or ())
    if state is None:
        return [cell.zero_state(x_TBC.shape[1], x_TBC.device, wide) for cell in cells]
    return [tuple(next(given).to(wide) for _ in cell.state_sizes) for cell in cells]


def run_two_streams(
    cell: HyperRHN, x_TBC: Tensor, state=None, mask_TB=None, noise=None, *, lanes: Lanes, chunk=25
) -> tuple[Tensor, State]:
    """Runs ``cell(x_TBC, state, mask_TB, noise)`` in chunks on two lanes; noise is that of all steps."""
    ((s, hyper_s),) = starts_of([cell], x_TBC, state)
    if mask_TB is not None:
        x_TBC = x_TBC.masked_fill(~mask_TB.unsqueeze(-1), 0.0)
    plan = backends.select(cell.request(x_TBC, (s, hyper_s), mask_TB, noise))
    projected, noise = cell.project(x_TBC, gemm=plan.gemm if plan.is_fused else None), noise or {}

    def named(draws) -> Noise | None:
        return dict(zip(noise, draws, strict=True)) or None

    def hyper(item, state):
        gx, hyper_g, mask, *draws = item
        prepared, after = cell.prepare((gx, hyper_g), (None, *state), mask, named(draws), plan)
        return (*prepared, mask, *draws), after[1:]

    def main(item, state):
        gx, trace, mask, *draws = item
        # The second is in the place of the hypernetwork's state, which is not read.
        y, after = cell.run((gx, trace), (*state, *state), mask, named(draws), plan)
        return (y,), after[:1]

    tensors = (*projected, mask_TB, *noise.values())
    (ys,), ((hyper_s,), (s,)) = pipeline([hyper, main], tensors, [(hyper_s,), (s,)], chunk, lanes)
    return torch.cat(ys), (s.to(x_TBC.dtype), hyper_s.to(x_TBC.dtype))
