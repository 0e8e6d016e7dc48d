"""Layers as a wavefront: each layer on a stream of its own, a chunk of steps behind the one below it.

Today a stack runs one layer after the other, each over the whole sequence. A step of a layer takes a few
microseconds and leaves most of a large GPU idle, so the time is the number of steps in a row, L T. In chunks
of K steps, layer l runs chunk k as soon as layer l - 1 has left it, and the steps in a row are
(T / K + L - 1) K: for 8 layers, T = 32 and K = 8 that is 88 in place of 256, a factor of 2.9 at best.

Autograd runs the backward pass of each operation on the stream of its forward pass and orders the streams
itself, so the backward wave needs no code. On a CPU there are no streams: the same chunks run in turn.

Shapes: T time, B batch, C input, H hidden, M context, K steps of a chunk.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.attention import Memory
from rhhn_fairseq.layers.decoder import AttentionDecoder
from rhhn_fairseq.layers.packed import run_reversed
from rhhn_fairseq.layers.stack import Stack
from rhhn_fairseq.ops.buffers import state_dtype
from rhhn_fairseq.ops.loop import State
from rhhn_fairseq.ops.matmul.gemm import affine

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


def run_stack(
    stack: Stack, x_TBC: Tensor, state=None, mask_TB=None, context_TBM=None, *, lanes: Lanes, chunk=8
) -> tuple[Tensor, State]:
    """Runs ``Stack.forward`` as a wavefront, in evaluation mode, because each chunk would draw masks anew.

    Bidirectional layers come first and run over the whole sequence, both directions side by side.
    """
    both, y, finals = stack.config.bidirectional_layers, x_TBC, []
    if stack.training or (state is not None and both):
        raise UsageError("run_stack: evaluation mode only, and no state for bidirectional layers")
    for layer in range(both):
        y, final = _both_directions(stack, layer, y, mask_TB, context_TBM, lanes)
        finals.append(final)
    stages = [partial(_layer, stack, layer) for layer in range(both, len(stack.cells))]
    if stages:
        starts = starts_of(stack.cells[both:], y, state)
        (ys, *_), states = pipeline(stages, (y, mask_TB, context_TBM), starts, chunk, lanes)
        y, finals = torch.cat(ys), finals + states
    return y, tuple(tensor.to(y.dtype) for final in finals for tensor in final)


def _layer(stack: Stack, layer: int, item: Tensors, state: State) -> tuple[Tensors, State]:
    """A stage: one layer over a chunk. What follows the mask and the context in ``item`` passes through."""
    below, mask, context, *others = item
    read = below if context is None else torch.cat([below, context], dim=-1)
    y, state = stack.cells[layer](read, state, mask)
    return (_add_below(stack, layer, y, below, mask), mask, context, *others), state


def _both_directions(stack, layer, below, mask_TB, context_TBM, lanes) -> tuple[Tensor, State]:
    """Runs a bidirectional layer; returns its outputs and the last state of the forward cell."""
    read, found = below if context_TBM is None else torch.cat([below, context_TBM], dim=-1), []
    given = leave((read, mask_TB))
    for lane, cell in enumerate((stack.cells[layer], stack.backward_cells[layer])):
        with lanes.on(lane):
            x, mask = take(given)
            y, state = run_reversed(cell, x, None, mask, None) if lane else cell(x, None, mask)
            found.append(leave((y, *state)))
    (y, *state), (reverse, *_) = map(take, found)
    return _add_below(stack, layer, torch.cat([y, reverse], dim=-1), below, mask_TB), tuple(state)


def _add_below(stack, layer, y, below, mask) -> Tensor:
    if not stack._is_residual(layer):
        return y
    y = y + below
    return y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0.0)


def run_decoder(
    decoder: AttentionDecoder, x_TBC: Tensor, memory: Memory, state=None, mask_TB=None, *, lanes, chunk=8
) -> tuple[Tensor, Tensor, State]:
    """Runs ``AttentionDecoder.forward`` as a wavefront, in evaluation mode and of the form v2.

    The bottom layer and its attention are the first stage, the layers that read the context the others.
    """
    if decoder.training or decoder.config.attention != "v2":
        raise UsageError("run_decoder: evaluation mode and attention v2 only")
    cells, source = decoder.each_cell(), leave(memory[:3])

    def bottom(item, state):
        x, mask, _ = item
        own = Memory(*take(source), memory.beams)
        y, context, weights, state = decoder.bottom(x, own, state, mask)
        return (y, mask, context, weights), state

    stages = [bottom, *(partial(_layer, decoder.upper, n) for n in range(len(cells) - 1))]
    starts = starts_of(cells, x_TBC, memory.start_rows() if state is None else state)
    (ys, _, contexts, weights), states = pipeline(stages, (x_TBC, mask_TB, None), starts, chunk, lanes)
    y = torch.cat(ys)
    if decoder.weight_o is not None:
        y = torch.tanh(affine(torch.cat([y, torch.cat(contexts)], dim=-1), decoder.weight_o))
    return y, torch.cat(weights, dim=1), tuple(t.to(y.dtype) for final in states for t in final)


@contextlib.contextmanager
def waving(model: nn.Module, lanes: Lanes, chunk: int) -> Iterator[None]:
    """Has a GNMT model's encoder and decoder run as wavefronts inside a ``with`` block.

    Lanes, one for each layer, are the same in all calls, because recordings belong to a stream.
    """
    stack, decoder = model.encoder.stack, model.decoder.decoder
    stack.forward = partial(run_stack, stack, lanes=lanes, chunk=chunk)
    decoder.forward = partial(run_decoder, decoder, lanes=lanes, chunk=chunk)
    try:
        yield
    finally:
        del stack.forward, decoder.forward
