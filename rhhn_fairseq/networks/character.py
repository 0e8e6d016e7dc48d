"""One-hot or embedded symbols, a stack of recurrent layers, an output layer over the symbols.

The layers hold only the symbols that occur. A dictionary's other entries (``<s>``, ``<pad>``, ``<unk>``) read
as a vector of zeros and score -inf.

Shapes: T time, B batch, V symbols that occur, D entries of the dictionary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rhhn_fairseq.cells.base import glorot_, orthogonal_
from rhhn_fairseq.cells.rhn import init_bias_
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.ops.regularise import draw_mask


class CharacterNetwork(nn.Module):
    """See the module's docstring. ``embed``, ``stack`` and ``output`` are what sampling calls.

    Args:
        stack: of the layers; its ``input_size`` is ``embed_dim``, or V for one-hot input.
        indices: the dictionary indices of the V symbols, in the network's order.
        codes: their code points (byte values in bytes mode), kept with the weights to tell vocabularies
            apart.
        entries: D, the size of the dictionary.
        embed_dim: width of the embeddings, 0 for one-hot input.
        orthogonal: output layer and embeddings begin orthogonal with a uniform bias, not Glorot with a zero
            one.
    """

    def __init__(
        self,
        stack: StackConfig,
        indices: Tensor,
        codes: Tensor,
        entries: int,
        embed_dim: int = 0,
        orthogonal: bool = False,
    ):
        super().__init__()
        V = len(indices)
        self.embedding_dropout = 0.0
        self.register_buffer("symbol_codes", codes)
        self.register_buffer("indices", indices, persistent=False)
        symbol_of = torch.full((entries,), V).index_copy_(0, indices, torch.arange(V))
        self.register_buffer("symbol_of", symbol_of, persistent=False)
        self.entries = entries
        self.embedding = None
        if embed_dim:
            self.embedding = nn.Parameter(torch.empty(V, embed_dim))
            nn.init.orthogonal_(self.embedding) if orthogonal else glorot_(self.embedding)
        self.stack = Stack(stack)
        self.weight_out = nn.Parameter(torch.empty(self.stack.output_size, V))
        self.bias_out = nn.Parameter(torch.zeros(V))
        if orthogonal:
            orthogonal_(self.weight_out)
            init_bias_(self.bias_out, self.stack.output_size)
        else:
            glorot_(self.weight_out)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input vectors of dictionary indices, zeros for entries that are no symbol."""
        V = len(self.indices)
        if self.embedding is None:
            weight = self.weight_out.new_zeros(V + 1, V)
            weight.fill_diagonal_(1.0)
        else:
            weight = F.pad(self.embedding, (0, 0, 0, 1))
        if self.training and self.embedding_dropout:
            keep = draw_mask((V + 1, 1), 1.0 - self.embedding_dropout, weight.device)
            weight = weight * keep / (1.0 - self.embedding_dropout)
        return F.embedding(self.symbol_of[tokens], weight)

    def output(self, y: Tensor) -> Tensor:
        """Logits over the dictionary [..., D] from the stack's output [..., H]."""
        logits = F.linear(y, self.weight_out.T, self.bias_out)
        full = logits.new_full((*logits.shape[:-1], self.entries), float("-inf"))
        return full.index_copy(-1, self.indices, logits)
