"""Drawing text from a character language model, symbol by symbol, in constant memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rhhn_fairseq.errors import UsageError

PROMPT_CHUNK = 512
LARGEST_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingConfig:
    """How the next symbol is drawn; ``UsageError`` names the invalid value.

    Attributes:
        temperature: logits are divided by it; 0 always takes the likeliest symbol.
        top_k: how many of the likeliest symbols to draw from; 0 for all.
        seed: of the draws; the same seed gives the same text.
    """

    temperature: float = 1.0
    top_k: int = 0
    seed: int = 1

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature} is not a number of 0 or more")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k} is too small, the smallest is 0 (all symbols)")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise UsageError(f"--seed {self.seed} is not a number from 0 to {LARGEST_SEED}")


def draw(logits_BD: Tensor, config: SamplingConfig, generator: torch.Generator) -> Tensor:
    """Draws one entry [B] from each row of logits; entries at -inf are never drawn."""
    if config.temperature == 0:
        return logits_BD.argmax(dim=-1)
    if 0 < config.top_k < logits_BD.shape[-1]:
        best, entries = logits_BD.topk(config.top_k, dim=-1)
        logits_BD = torch.full_like(logits_BD, float("-inf")).scatter(-1, entries, best)
    # In float64, and relative to the largest, so that a small temperature does not overflow.
    scaled = (logits_BD.double() - logits_BD.amax(dim=-1, keepdim=True).double()) / config.temperature
    return torch.multinomial(scaled.softmax(dim=-1), 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(model: nn.Module, prompt: list[int], config: SamplingConfig) -> Iterator[int]:
    """Yields dictionary indices one after another, without end.

    Args:
        model: on the CPU; has ``embed``, ``stack`` and ``output``, as ``CharLM`` does; it is set to
            evaluation mode.
        prompt: dictionary indices read first, at least one.
        config: how to draw.
    """
    model.eval()
    generator = torch.Generator().manual_seed(config.seed)
    state, tokens = None, torch.tensor(prompt).unsqueeze(1)
    for chunk in tokens.split(PROMPT_CHUNK):
        y, state = model.stack(model.embed(chunk), state)
    while True:
        entry = draw(model.output(y[-1]), config, generator)
        yield int(entry)
        y, state = model.stack(model.embed(entry.unsqueeze(0)), state)
