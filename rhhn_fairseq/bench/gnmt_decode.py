"""``gnmt-decode``: beam search with translation models, compared with fairseq's ``lstm``."""

import math
from dataclasses import dataclass

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from rhhn_fairseq.bench import gnmt
from rhhn_fairseq.bench.gnmt import TranslationConfig, columns, compare
from rhhn_fairseq.bench.machine import measuring, now
from rhhn_fairseq.bench.report import draw_bars, make_report
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.errors import UsageError

BATCHES = (1, 64)
"""Numbers of sentences that are translated at a time."""


@dataclass(frozen=True, kw_only=True)
class Config(TranslationConfig):
    """What is timed; ``UsageError`` names a value that cannot work."""

    beam: int = option(5, help="width of the beam", low=1)

    def __post_init__(self):
        super().__post_init__()
        # fairseq would search with a narrower one.
        if self.beam >= self.vocab_size:
            raise UsageError(
                f"--beam {self.beam} is too large, it must be below --vocab-size {self.vocab_size}"
            )


COLUMNS = columns("target")

SMOKE = gnmt.SMOKE


def search(
    model: nn.Module, tokens: Tensor, dictionary: Dictionary, beam: int, prefix: Tensor | None = None
) -> list[list[dict]]:
    """Runs a beam search for as many symbols as the source has; returns hypotheses by sentence, best first.

    Args:
        prefix: symbols that each begins with, [sentences, up to one less than the length]; None for none.
    """
    length = tokens.shape[1]
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=length - 1, min_len=length - 1
    )
    lengths = torch.full((len(tokens),), length, device=tokens.device)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
    results = generator.generate([model], sample, prefix_tokens=prefix)
    assert all(len(hypotheses[0]["tokens"]) == length for hypotheses in results)
    return results


def time_generation(model: nn.Module, tokens: Tensor, dictionary: Dictionary, beam: int) -> float:
    """Returns the seconds of a ``search``."""
    start = now(tokens.device)
    search(model, tokens, dictionary, beam)
    return now(tokens.device) - start


def scores(model: nn.Module, tokens: Tensor, dictionary: Dictionary, beam: int) -> dict[str, Tensor]:
    """Returns log-probabilities, relative to uniform, of the source's symbols in a ``search`` forced on them.

    It takes the same steps as the timed search, whose symbols may change with rounding. With random weights
    all symbols are almost equally likely, so errors show in the difference from uniform.
    """
    # fairseq sums scores in float32 and takes differences of the sums.
    results = search(model, tokens, dictionary, beam, tokens[:, :-1])
    logarithms = torch.stack([hypotheses[0]["positional_scores"] for hypotheses in results])
    return {"scores": logarithms + math.log(len(dictionary))}


def run(config: Config) -> dict:
    """Checks and times all models. Raises UsageError if one gives wrong results."""

    def measure(model, tokens, dictionary):
        return time_generation(model, tokens, dictionary, config.beam)

    def check(model, tokens, dictionary):
        return scores(model, tokens, dictionary, config.beam)

    with measuring(config):
        return make_report("gnmt-decode", config, compare(config, BATCHES, measure, check, counted=1))


def draw(report: dict):
    """Returns a bar chart of the speeds relative to fairseq's."""
    label = ("model", "backend", "sentences")
    return draw_bars(report, label, "target tokens a second / fairseq lstm", "speed_ratio")
