"""A step of beam search as one CUDA graph: embedding, layers, attention and output layer in a single launch.

A graph has fixed shapes. Sentences are padded to a power of two and source positions to a multiple of
``POSITIONS``. So the batches of a corpus share a few graphs, and a batch in which sentences end one by one
changes its graph only a few times. The step includes beam search's reordering of the state.

``RHHN_CUDA_GRAPHS=0`` turns it off; see ``ops/backends/graphs.py``.

Shapes: B rows, N sentences, S source positions, M memory, V dictionary.
"""

import functools
import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rhhn_fairseq.layers.attention import Memory
from rhhn_fairseq.ops import policy
from rhhn_fairseq.ops.backends import graphs
from rhhn_fairseq.ops.loop import State, reorder_state

logger = logging.getLogger(__name__)

POSITIONS = 16
"""Graphs exist for multiples of this many source positions."""

Step = Callable[[Tensor, Memory, State], tuple[Tensor, Tensor, State]]

# A graph reads the weights at their addresses, so it belongs to its module and is freed with it.
_recordings: WeakKeyDictionary[nn.Module, graphs.Recordings] = WeakKeyDictionary()


def decoding_step(
    module: nn.Module, step: Step, tokens_B1: Tensor, memory: Memory, state: State, order_B: Tensor | None
) -> tuple[Tensor, Tensor, State]:
    """Runs ``step`` on tokens, memory and the state's rows in ``order_B``, as a graph where that is enabled.

    Args:
        module: holds the weights that ``step`` reads.
        step: a method that maps tokens [B, 1], memory and state to logits [B, 1, V], attention weights
            [B, 1, S] and state.
        state: tensors [any, ·]. order_B: the row of the state that each row continues; None for its own.
    """
    tensors = [tokens_B1, *state, *memory[:3]]
    if not _as_graph(module, tensors):
        return step(tokens_B1, memory, state if order_B is None else reorder_state(state, order_B))
    B, (N, S) = len(tokens_B1), memory.mask_NS.shape
    # Up to the next power of two.
    more_N = (1 << (N - 1).bit_length()) - N
    rows, more_S = (N + more_N) * memory.beams, -S % POSITIONS
    if order_B is not None and len(state[0]) > rows:
        state, order_B = reorder_state(state, order_B), None
    order = torch.arange(rows, device=tokens_B1.device)
    if order_B is not None:
        order[:B] = order_B
    mask_NS = F.pad(memory.mask_NS, (0, more_S, 0, more_N))
    # The softmax of a sentence without any position would be NaN.
    mask_NS[N:, 0] = True
    values = [
        F.pad(tokens_B1, (0, 0, 0, rows - B)),
        order,
        *(F.pad(tensor, (0, 0, 0, rows - len(tensor))) for tensor in state),
        *(F.pad(tensor, (0, 0, 0, more_S, 0, more_N)) for tensor in memory[:2]),
        mask_NS,
    ]

    def call(tensors):
        tokens, order, *others = tensors
        begin = reorder_state(tuple(others[:-3]), order)
        values, keys, mask_NS = others[-3:]
        logits, weights, after = step(tokens, Memory(values, keys, mask_NS, memory.beams), begin)
        return logits, weights, *after

    recordings = _recordings.setdefault(module, graphs.Recordings(graphs.record))
    weights_at = tuple(parameter.data_ptr() for parameter in module.parameters())
    # A graph records the kernels of one backend.
    key = weights_at, memory.beams, step.__qualname__, policy.current().kernel
    logits, weights, *after = graphs.replayed(key, call, values, recordings)
    return logits[:B], weights[:B, :, :S], tuple(tensor[:B] for tensor in after)


def _as_graph(module: nn.Module, tensors: list[Tensor]) -> bool:
    """Whether a step runs as a graph; on a GPU, the answer is logged once."""
    device = tensors[0].device
    if module.training or torch.is_grad_enabled() or not graphs.possible(device):
        return False
    if torch.is_autocast_enabled(device.type):
        # The graph would read autocast's copies of the weights.
        _log_once("without CUDA graphs, which autocast does not support")
        return False
    _log_once("as CUDA graphs")
    return True


@functools.cache
def _log_once(how: str) -> None:
    logger.info("decoding steps run %s", how)
