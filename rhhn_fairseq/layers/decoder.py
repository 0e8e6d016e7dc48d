"""The decoder of GNMT: a bottom layer and its attention, and layers above that all read the context.

It has two forms. ``paper`` (Wu et al. 2016): the bottom layer's previous output is the query, and every layer
reads the context, including the bottom one, so attention is part of its recurrence. ``v2`` (NVIDIA's GNMT
v2): the bottom layer's current output is the query, and the layers above it read the context, so attention
and every layer run on the whole sequence in one call each.

In either form ``context_to_output`` connects the context to the output layer without a recurrent layer
between them, as in Luong et al. 2015 (arXiv 1508.04025, equation 5): ``tanh([y, context] W_o)``.

Shapes: T target time, S source time, B batch, C input, H hidden, M memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.contract import glorot_
from rhhn_fairseq.cells.registry import build_cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.attention import (
    AdditiveAttention,
    Attention,
    FeedbackCell,
    GeneralAttention,
    Memory,
    QueryingCell,
    SourceMemory,
)
from rhhn_fairseq.layers.stack import FeedbackStack, StackConfig
from rhhn_fairseq.ops.loop import State
from rhhn_fairseq.ops.matmul.gemm import affine

ATTENTION_FORMS = ("paper", "v2")
ATTENTION_SCORES = ("additive", "general")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(StackConfig):
    """A stack's options, whose layers include the bottom one, and those of the attention."""

    attention: str = option(
        "paper",
        help="'paper': the query is the bottom layer's output of the step before, the context goes to all "
        "layers; 'v2': the query is its current output, the context goes to the layers above",
        choices=ATTENTION_FORMS,
    )
    attention_score: str = option(
        "additive",
        help="'additive': one hidden layer; 'general': Luong's product of query and source",
        choices=ATTENTION_SCORES,
    )
    attention_size: int = option(
        0, help="width of the additive attention's hidden layer; 0: the hidden size", low=0
    )
    attention_normalised: bool = option(False, help="weight-normalise the attention's output vector")
    context_dropout: float = option(
        0.0, help="dropout on the context that the upper layers read", low=0, below=1
    )
    context_to_output: bool = option(
        False, help="combine the last layer's output with the context, as Luong et al. 2015 do (equation 5)"
    )

    def __post_init__(self):
        super().__post_init__()
        self.check_feedback()
        if self.context_size < 1:
            raise UsageError(f"Decoder: context_size={self.context_size} is too small, the smallest is 1")
        if self.attention == "v2" and self.layers < 2:
            raise UsageError(
                "Decoder: attention v2 gives the context to the layers above the first, so layers=1 is too "
                "few; take 2 or more, or the paper's form"
            )

    @property
    def attention_width(self) -> int:
        """Width of the attention's hidden layer."""
        return self.attention_size or self.hidden_size

    def build_attention(self) -> Attention:
        """Builds the decoder's side of the attention."""
        if self.attention_score == "general":
            return GeneralAttention(self.hidden_size, self.context_size)
        return AdditiveAttention(self.hidden_size, self.attention_width, self.attention_normalised)

    def build_memory(self) -> SourceMemory:
        """Builds the encoder's side of the attention."""
        return SourceMemory(
            self.context_size, None if self.attention_score == "general" else self.attention_width
        )


class AttentionDecoder(FeedbackStack):
    """See the module's docstring."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig):
        super().__init__()
        feeds = config.attention == "paper"
        reads = config.input_size + (config.context_size if feeds else 0)
        cell = build_cell(config.cell, reads, config.hidden_size, **config.cell_options)
        self.bottom = (FeedbackCell if feeds else QueryingCell)(cell, config.build_attention())
        self.build_upper(self.bottom, config, config.context_size)
        self.weight_o = None
        if config.context_to_output:
            self.weight_o = nn.Parameter(
                torch.empty(config.hidden_size + config.context_size, config.hidden_size)
            )
            glorot_(self.weight_o)

    def each_cell(self):
        return [self.bottom.cell, *(self.upper.cells if self.upper else ())]

    def forward(
        self,
        x_TBC: Tensor,
        memory: Memory,
        state: State | None = None,
        mask_TB: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, State]:
        """Runs over a sequence of embedded target symbols.

        Args:
            x_TBC: embeddings [T, B, C]. memory: what ``SourceMemory`` made from the encoder's outputs.
            state: tensors [B, ·] in ``state_sizes`` order; None for the memory's start.
            mask_TB: bool [T, B], true at real positions; None if padding is on the right only, where no
                earlier position reads it.

        Returns:
            outputs [T, B, H], attention weights [B, T, S] and the state after the last step.
        """
        config = self.config
        low, high = self.split_state(memory.start_rows() if state is None else state)
        x_TBC = self.drop(x_TBC, config.input_dropout)
        y, context, weights, low = self.bottom(x_TBC, memory, low, mask_TB)
        context = self.drop(context, config.context_dropout)
        y, state = self.run_upper(y, low, high, mask_TB, context)
        if self.weight_o is not None:
            y = self.drop(y, config.layer_dropout)
            y = torch.tanh(affine(torch.cat([y, context], dim=-1), self.weight_o))
        return self.drop(y, config.output_dropout), weights, state
