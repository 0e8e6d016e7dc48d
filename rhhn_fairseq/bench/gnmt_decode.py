"""``gnmt-decode``: beam search with translation models, beside fairseq's ``lstm``."""

from dataclasses import dataclass

import torch
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from rhhn_fairseq.bench import gnmt
from rhhn_fairseq.bench.gnmt import COLUMNS, TranslationConfig, compare  # noqa: F401
from rhhn_fairseq.bench.machine import measuring, now
from rhhn_fairseq.bench.report import draw_bars, make_report
from rhhn_fairseq.cells.base import option

BATCHES = (1, 64)
"""Sentences that are translated at a time."""


@dataclass(frozen=True, kw_only=True)
class Config(TranslationConfig):
    """What is timed; ``UsageError`` names a value that cannot work."""

    beam: int = option(5, help="width of the beam", low=1)


SMOKE = gnmt.SMOKE


def time_generation(model: nn.Module, tokens: Tensor, dictionary: Dictionary, beam: int) -> float:
    """Seconds of a beam search that gives as many symbols as the source has."""
    length = tokens.shape[1]
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=length - 1, min_len=length - 1
    )
    lengths = torch.full((len(tokens),), length, device=tokens.device)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
    start = now(tokens.device)
    found = generator.generate([model], sample)
    seconds = now(tokens.device) - start
    assert all(len(hypotheses[0]["tokens"]) == length for hypotheses in found)
    return seconds


def run(config: Config) -> dict:
    """Checks and times all models. Raises UsageError if one gives wrong results."""

    def measure(model, tokens, dictionary):
        return time_generation(model, tokens, dictionary, config.beam)

    with measuring(config):
        return make_report("gnmt-decode", config, compare(config, BATCHES, measure))


def draw(report: dict):
    """Bars of the speeds beside fairseq's."""
    label = ("model", "backend", "sentences")
    return draw_bars(report, label, "target tokens a second / fairseq lstm", "speed_ratio")
