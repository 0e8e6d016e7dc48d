"""A tiny character network with random weights, and its symbols."""

import torch

from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.nn.character import CharacterNetwork

SYMBOLS = list("abcd <")


def build(cell: str, layers: int = 1, size: int = 6, embed_dim: int = 0, **options):
    """The network in float64, and its vocabulary of six characters and the end of a line."""
    torch.manual_seed(1)
    vocabulary = CharVocabulary(SYMBOLS, "text", True, "six characters")
    stack = StackConfig(
        cell=cell,
        input_size=embed_dim or len(vocabulary.model_indices()),
        hidden_size=size,
        layers=layers,
        cell_options=options,
    )
    network = CharacterNetwork(stack, vocabulary, embed_dim).double().eval()
    # At first a hypernetwork generates the same whatever it reads.
    with torch.no_grad():
        for weight in network.parameters():
            weight += 0.3 * torch.randn_like(weight)
    return network, vocabulary
