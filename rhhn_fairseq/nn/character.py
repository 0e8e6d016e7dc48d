"""A character network: one-hot or embedded symbols, recurrent layers, an output layer over the symbols.

The input and output layers cover only the symbols that occur. Other entries of the dictionary (``<s>``,
``<pad>``, ``<unk>``) are zero vectors as input and have a logit of -inf.

Shapes: T time, B batch, V symbols that occur, D entries of the dictionary.
"""

from dataclasses import asdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rhhn_fairseq.cells.contract import glorot_, orthogonal_
from rhhn_fairseq.cells.rhn import init_bias_
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.data.text.words import WordVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.layers.window import one_hot
from rhhn_fairseq.ops.regularise import draw_mask
from rhhn_fairseq.saving import KINDS, Kind, Pretrained, Tensors


class CharacterNetwork(Pretrained, nn.Module):
    """See the module's docstring. Sampling calls ``embed``, ``stack`` and ``output``.

    The buffer ``symbol_codes`` holds the code points of the symbols (byte values in bytes mode), which are
    kept with the weights to tell vocabularies apart.

    Args:
        stack: configuration of the layers; its ``input_size`` is ``embed_dim``, or V for one-hot input.
        vocabulary: the symbols that occur.
        embed_dim: width of the embeddings, 0 for one-hot input.
        embedding_dropout: probability of dropping a symbol's embedding in training.
        orthogonal: whether output layer and embeddings are initialised orthogonally with a uniform bias,
            instead of Glorot with a zero bias.
    """

    kind = "characters"
    symbol_codes: Tensor
    indices: Tensor
    symbol_of: Tensor

    def __init__(
        self,
        stack: StackConfig,
        vocabulary: CharVocabulary | WordVocabulary,
        embed_dim: int = 0,
        embedding_dropout: float = 0.0,
        orthogonal: bool = False,
    ):
        super().__init__()
        indices = vocabulary.model_indices()
        V = len(indices)
        self.vocabulary = vocabulary
        self.entries = len(vocabulary)
        self.embedding_dropout = embedding_dropout
        symbol_of = np.full(self.entries, V)
        symbol_of[indices] = np.arange(V)
        self.register_buffer("symbol_codes", torch.from_numpy(vocabulary.codes()))
        self.register_buffer("indices", torch.from_numpy(indices), persistent=False)
        self.register_buffer("symbol_of", torch.from_numpy(symbol_of), persistent=False)
        self.embedding = None
        if embed_dim:
            self.embedding = nn.Parameter(torch.empty(V, embed_dim))
            orthogonal_(self.embedding) if orthogonal else glorot_(self.embedding)
        self.stack = Stack(stack)
        self.weight_out = nn.Parameter(torch.empty(self.stack.output_size, V))
        self.bias_out = nn.Parameter(torch.zeros(V))
        if orthogonal:
            orthogonal_(self.weight_out)
            init_bias_(self.bias_out, self.stack.output_size)
        else:
            glorot_(self.weight_out)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, state=None):
        """Returns the scores of the symbol after each position.

        Args:
            tokens: dictionary indices [B, T], as ``vocabulary.encode`` gives them.
            mask: bool [B, T], true at real positions; None where all are.
            state: the state to start from, [B, ·] in the stack's order; None for zeros.

        Returns:
            logits [B, T, D], -inf for entries that are not symbols; and a dictionary: the ``state`` after the
            last position, ``outputs`` of the last layer [T, B, H], and ``dropped_outputs``, which the output
            layer reads.
        """
        mask_TB = None if mask is None else mask.T
        y, state = self.stack(self.embed(tokens.T), state, mask_TB, drop_output=False)
        dropped = self.stack.drop_output(y)
        extra = {"state": state, "outputs": y, "dropped_outputs": dropped}
        return self.output(dropped).transpose(0, 1), extra

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the vectors [..., V or embed_dim] of indices [...]; zeros for entries without a symbol."""
        V, symbols = len(self.indices), self.symbol_of[tokens]
        if self.embedding is None:
            x = one_hot(symbols, V, self.weight_out.dtype)
        else:
            x = F.embedding(symbols, F.pad(self.embedding, (0, 0, 0, 1)))
        if self.training and self.embedding_dropout:
            keep = draw_mask((V + 1, 1), 1.0 - self.embedding_dropout, x.device)
            x = x * keep[symbols] / (1.0 - self.embedding_dropout)
        return x

    def output(self, y: Tensor) -> Tensor:
        """Returns the logits over the dictionary [..., D] from the stack's output [..., H]."""
        logits = F.linear(y, self.weight_out.T, self.bias_out)
        full = logits.new_full((*logits.shape[:-1], self.entries), float("-inf"))
        return full.index_copy(-1, self.indices, logits)


def refuse_words(network: CharacterNetwork, what: str) -> None:
    """Raises UsageError for a model of words, of what was asked for."""
    if network.vocabulary.mode == "words":
        raise UsageError(f"{what}: this is a model of words; only those of characters can be converted")


def _describe(network: CharacterNetwork) -> dict:
    vocabulary = network.vocabulary
    refuse_words(network, "save_pretrained")
    return {
        "stack": asdict(network.stack.config),
        "embed_dim": 0 if network.embedding is None else network.embedding.shape[1],
        "embedding_dropout": network.embedding_dropout,
        "mode": vocabulary.mode,
        "newline_occurs": vocabulary.newline_occurs,
        "corpus": vocabulary.corpus,
        "reverse": vocabulary.reverse,
    }


def _build(config: dict, tensors: Tensors) -> CharacterNetwork:
    codes = tensors["symbol_codes"].tolist()
    reverse = config.pop("reverse", False)
    vocabulary = CharVocabulary.from_codes(codes, config.pop("mode"), config.pop("corpus"), reverse)
    if vocabulary.codes().tolist() != codes or vocabulary.newline_occurs != config.pop("newline_occurs"):
        raise UsageError("symbol_codes has the end of a line where newline_occurs says otherwise")
    return CharacterNetwork(StackConfig(**config.pop("stack")), vocabulary, **config)


KINDS["characters"] = Kind(_describe, _build)
