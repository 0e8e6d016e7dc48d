"""Drawing text from a character language model, symbol by symbol, in constant memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from rhhn_fairseq.data.text.words import prompt_indices
from rhhn_fairseq.options import check_fields, option

PROMPT_CHUNK = 512
LARGEST_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingConfig:
    """How the next symbol is drawn; ``UsageError`` names the invalid value. A seed gives the same text."""

    temperature: float = option(1.0, help="divides the logits; 0: always take the likeliest", low=0)
    top_k: int = option(0, help="sample from the k likeliest only; 0: from all", low=0)
    top_p: float = option(
        1.0, help="sample from the fewest likeliest that have this probability together", low=0, high=1
    )
    seed: int = option(1, help="seed of the samples", low=0, high=LARGEST_SEED)

    def __post_init__(self):
        check_fields(self, flags=True)


def draw(logits_BD: Tensor, config: SamplingConfig, generator: torch.Generator) -> Tensor:
    """Draws one entry [B] from each row of logits; entries at -inf are never drawn."""
    if config.temperature == 0:
        return logits_BD.argmax(dim=-1)
    if 0 < config.top_k < logits_BD.shape[-1]:
        best, entries = logits_BD.topk(config.top_k, dim=-1)
        logits_BD = torch.full_like(logits_BD, float("-inf")).scatter(-1, entries, best)
    # In float64, and relative to the largest, so that a small temperature does not overflow.
    scaled = (logits_BD.double() - logits_BD.amax(dim=-1, keepdim=True).double()) / config.temperature
    shares = scaled.softmax(dim=-1)
    if config.top_p < 1:
        # Holtzman et al. 2020 (arXiv 1904.09751): those before which at most top_p lies.
        sorted_, entries = shares.sort(dim=-1, descending=True)
        sorted_ = sorted_.where(sorted_.cumsum(-1) - sorted_ <= config.top_p, 0.0)
        shares = torch.zeros_like(shares).scatter(-1, entries, sorted_)
    return torch.multinomial(shares, 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: list[int], config: SamplingConfig, batch: int = 1
) -> Iterator[list[int]]:
    """Yields the next dictionary index of each text, without end.

    Args:
        model: on the CPU; has ``embed``, ``stack`` and ``output``, as ``CharLM`` does; it is set to
            evaluation mode.
        prompt: dictionary indices read first, at least one.
        config: how to draw. batch: how many texts continue the prompt.
    """
    model.eval()
    generator = torch.Generator().manual_seed(config.seed)
    state, tokens = None, torch.tensor(prompt).unsqueeze(1)
    for chunk in tokens.split(PROMPT_CHUNK):
        y, state = model.stack(model.embed(chunk), state)
    y, state = y[-1:].expand(-1, batch, -1), tuple(entry.expand(batch, -1) for entry in state)
    while True:
        entry = draw(model.output(y[-1]), config, generator)
        yield entry.tolist()
        y, state = model.stack(model.embed(entry.unsqueeze(0)), state)


def sample(
    model: nn.Module, prompt: str = "", length: int = 300, config: SamplingConfig | None = None
) -> str:
    """Returns a prompt and what the model continues it with.

    Args:
        model: a ``CharacterNetwork`` or ``CharLM`` on the CPU; it is set to evaluation mode.
        length: symbols to draw. config: how to draw, by default ``SamplingConfig()``.

    Raises:
        UsageError: the prompt has a symbol that the model does not know.
    """
    read = prompt_indices(model.vocabulary, prompt, "the prompt")
    drawn = [entry for (entry,) in islice(generate(model, read, config or SamplingConfig()), length)]
    decoder = model.vocabulary.incremental_decoder()
    return decoder.feed([*read[1:], *drawn]) + decoder.finish()
