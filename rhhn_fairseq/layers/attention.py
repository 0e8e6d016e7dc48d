"""Attention, and the first decoder layer of GNMT, which reads its context at every step.

Shapes: T target time, S source time, B batch, N sentences, M memory, A attention, Q query, C input,
H hidden.

Sources: Bahdanau et al. 2014 (arXiv 1409.0473); Wu et al. 2016, GNMT (arXiv 1609.08144), section 3;
normalised: Salimans and Kingma 2016 as tf.contrib.seq2seq and NVIDIA's GNMT v2 use it; general: Luong et
al. 2015 (arXiv 1508.04025), section 3.1.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.contract import apply_maps
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.feedback import run_with_feedback
from rhhn_fairseq.ops.energy import energies
from rhhn_fairseq.ops.loop import Noise, State, reorder_state
from rhhn_fairseq.ops.matmul.gemm import affine


class Memory(NamedTuple):
    """What the decoder attends to: the encoder's outputs, stored once per sentence.

    Attributes:
        values_NSM: the outputs. keys_NSA: their projection into the attention's space.
        mask_NS: bool, true at real positions.
        beams: consecutive rows of the decoder's batch that read the same sentence, B = N * beams.
        start: the state that the decoder starts from, tensors [N, ·]; None for zeros.
    """

    values_NSM: Tensor
    keys_NSA: Tensor
    mask_NS: Tensor
    beams: int = 1
    start: State | None = None

    def start_rows(self) -> State | None:
        """Returns ``start`` for every row, tensors [B, ·]."""
        if self.start is None:
            return None
        return tuple(tensor.repeat_interleave(self.beams, dim=0) for tensor in self.start)

    def reorder(self, index_B: Tensor) -> "Memory":
        """Returns the memory of the chosen rows; nothing is copied while rows stay within their sentence.

        Beam search repeats every sentence, then reorders rows within a sentence at every step and drops
        finished sentences, so a memory for every row would be copied needlessly at every step.
        """
        N, count = self.mask_NS.shape[0], index_B.numel()
        if N == 1 and count:
            return self._replace(beams=count)
        sentence_B = torch.div(index_B, self.beams, rounding_mode="floor")
        # The first time, k rows for each sentence; later the number of beams stays.
        beams = count // N if self.beams == 1 and count and count % N == 0 else self.beams
        if count % beams == 0:
            by_sentence = sentence_B.view(-1, beams)
            sentence_N = by_sentence[:, 0]
            if bool((by_sentence == sentence_N.unsqueeze(1)).all()):
                return self._choose(sentence_N, beams)
        return self._choose(sentence_B, 1)

    def _choose(self, sentence_N: Tensor, beams: int) -> "Memory":
        every = torch.arange(self.mask_NS.shape[0], device=sentence_N.device)
        if torch.equal(sentence_N, every):
            return self._replace(beams=beams)
        start = None if self.start is None else reorder_state(self.start, sentence_N)
        values, keys, mask = (tensor.index_select(0, sentence_N) for tensor in self[:3])
        return Memory(values, keys, mask, beams, start)


class SourceMemory(nn.Module):
    """Builds a ``Memory`` from the encoder's outputs: the source side of attention, once per sentence.

    Keys are ``m W_m + b``, or m itself if there is no attention size. Initialisation: Glorot uniform, b zero.
    """

    def __init__(self, memory_size: int, attention_size: int | None):
        super().__init__()
        self.weight_m = self.bias = None
        if attention_size is not None:
            self.weight_m = nn.Parameter(torch.empty(memory_size, attention_size))
            self.bias = nn.Parameter(torch.zeros(attention_size))
            nn.init.xavier_uniform_(self.weight_m)

    def forward(self, values_SBM: Tensor, mask_SB: Tensor, start: State | None = None) -> Memory:
        """Returns the memory of a batch of encoder outputs; ``mask_SB`` is true at real positions."""
        values = keys = values_SBM.transpose(0, 1).contiguous()
        if self.weight_m is not None:
            (keys,) = apply_maps(values, ((self.weight_m, self.bias),))
        return Memory(values, keys, mask_SB.T, start=start)


class Attention(nn.Module):
    """Computes contexts from energies of queries and source positions; subclasses define ``energies``."""

    def energies(self, query_NRQ: Tensor, memory: Memory) -> Tensor:
        """Returns energies [N, R, S], in float32 at least, minus infinity at padding."""
        raise NotImplementedError(f"{type(self).__name__} has no energies")

    def forward(self, query_TBQ: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Returns contexts [T, B, M] and attention weights [B, T, S], zero at padding, of whole sequences."""
        T, B, _ = query_TBQ.shape
        N, S, M = memory.values_NSM.shape
        # A query's step and its beam are both rows of one sentence's matrix, R = beams * T.
        query_NRQ = query_TBQ.transpose(0, 1).reshape(N, -1, query_TBQ.shape[-1])
        weights_NRS = self.energies(query_NRQ, memory).softmax(dim=-1)
        context_NRM = torch.bmm(weights_NRS.to(memory.values_NSM.dtype), memory.values_NSM)
        return context_NRM.view(B, T, M).transpose(0, 1), weights_NRS.view(B, T, S)


class AdditiveAttention(Attention):
    """Attention with one hidden layer: ``energy = v . tanh(q W_q + key)``, softmax over the source.

    ``normalised`` replaces v by ``g v / |v|`` with g starting at ``1 / sqrt(A)``.

    Initialisation: W_q Glorot uniform, v uniform within ``1 / sqrt(A)``.
    """

    def __init__(self, query_size: int, attention_size: int, normalised: bool = False):
        super().__init__()
        self.weight_q = nn.Parameter(torch.empty(query_size, attention_size))
        self.v = nn.Parameter(torch.empty(attention_size))
        self.g = nn.Parameter(torch.tensor(attention_size**-0.5)) if normalised else None
        nn.init.xavier_uniform_(self.weight_q)
        nn.init.uniform_(self.v, -(attention_size**-0.5), attention_size**-0.5)

    def energies(self, query_NRQ, memory):
        v = self.v if self.g is None else self.g * self.v / self.v.norm()
        return energies(affine(query_NRQ, self.weight_q), memory.keys_NSA, v, memory.mask_NS)


class GeneralAttention(Attention):
    """Luong's general attention: ``energy = (q W_q) . key``, with the encoder's outputs as keys.

    Initialisation: W_q Glorot uniform.
    """

    def __init__(self, query_size: int, memory_size: int):
        super().__init__()
        self.weight_q = nn.Parameter(torch.empty(query_size, memory_size))
        nn.init.xavier_uniform_(self.weight_q)

    def energies(self, query_NRQ, memory):
        energy_NRS = torch.bmm(affine(query_NRQ, self.weight_q), memory.keys_NSA.transpose(1, 2))
        # Half precision is too coarse for a softmax over a long source.
        energy_NRS = energy_NRS.to(torch.promote_types(energy_NRS.dtype, torch.float32))
        return energy_NRS.masked_fill(~memory.mask_NS.unsqueeze(1), float("-inf"))


class FeedbackCell(nn.Module):
    """A cell that reads ``[x; context]``, where its own previous output is the query for the context.

    GNMT's bottom decoder layer as printed (Wu et al. 2016, equation 4 and figure 1). Its state is only
    the cell's, because the previous state determines the context. ``Cell.prepare``, which for example
    runs a hypernetwork, runs step by step, see ``feedback``.

    Args:
        cell: reads an input of width ``C + M``. attention: queried by the cell's output.
    """

    def __init__(self, cell: Cell, attention: Attention):
        super().__init__()
        self.cell, self.attention = cell, attention
        self.state_sizes = cell.state_sizes

    def forward(
        self,
        x_TBC: Tensor,
        memory: Memory,
        state: State | None = None,
        mask_TB: Tensor | None = None,
        noise: Noise | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        """Runs over a sequence; ``x_TBC``, ``state``, ``mask_TB`` and ``noise`` as in ``Cell.forward``.

        Returns:
            outputs [T, B, H], contexts [T, B, M], attention weights [B, T, S] and the state after the
            last step.

        Raises:
            UsageError: the widths of input and context do not add up to that of the cell's input.
        """
        C, M, cell = x_TBC.shape[-1], memory.values_NSM.shape[-1], self.cell
        if C + M != cell.config.input_size:
            raise UsageError(
                f"FeedbackCell: input of width {C} and context of width {M}, the cell reads "
                f"{cell.config.input_size}"
            )

        def step(advance, state, noise_t):
            context, weight = self.attention(state[0].unsqueeze(0), memory)
            y_BH, state = advance(context[0], state, noise_t)
            return (y_BH, context[0], weight[:, 0]), state

        (y_TBH, context_TBM, weights_TBS), state = run_with_feedback(
            cell, step, x_TBC, state, cell.zero_state, mask_TB, noise
        )
        return y_TBH, context_TBM, weights_TBS.transpose(0, 1), state


class QueryingCell(nn.Module):
    """A cell whose current output is the query, so that cell and attention each run on whole sequences.

    The bottom decoder layer of NVIDIA's GNMT v2. Arguments and results are those of ``FeedbackCell``, but
    the cell reads no context.
    """

    def __init__(self, cell: Cell, attention: Attention):
        super().__init__()
        self.cell, self.attention = cell, attention
        self.state_sizes = cell.state_sizes

    def forward(self, x_TBC, memory, state=None, mask_TB=None, noise=None):
        """See ``FeedbackCell.forward``."""
        y_TBH, state = self.cell(x_TBC, state, mask_TB, noise)
        return y_TBH, *self.attention(y_TBH, memory), state
