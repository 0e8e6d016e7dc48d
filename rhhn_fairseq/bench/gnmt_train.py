"""``gnmt-train``: forward and backward of translation models, compared with fairseq's ``lstm``."""

from dataclasses import dataclass

from torch import Tensor, nn

from rhhn_fairseq.bench import gnmt
from rhhn_fairseq.bench.gnmt import TranslationConfig, columns, compare, loss_of, results
from rhhn_fairseq.bench.machine import measuring, now
from rhhn_fairseq.bench.report import draw_bars, make_report
from rhhn_fairseq.cells.config import option


@dataclass(frozen=True, kw_only=True)
class Config(TranslationConfig):
    """What is timed; ``UsageError`` names a value that cannot work."""

    sentences: int = option(128, help="sentences in a batch", low=1)


COLUMNS = columns("source + target")

SMOKE = gnmt.SMOKE | {"sentences": 2}


def time_training(model: nn.Module, tokens: Tensor) -> float:
    """Returns the seconds of a forward and a backward pass; the source is also the target."""
    model.train()
    model.zero_grad()
    start = now(tokens.device)
    loss_of(model, tokens)[0].backward()
    return now(tokens.device) - start


def run(config: Config) -> dict:
    """Checks and times all models. Raises UsageError if one gives wrong results."""
    with measuring(config):
        rows = compare(
            config,
            (config.sentences,),
            lambda model, tokens, _: time_training(model, tokens),
            results,
            counted=2,
        )
        return make_report("gnmt-train", config, rows)


def draw(report: dict):
    """Returns a bar chart of the speeds relative to fairseq's."""
    return draw_bars(report, ("model", "backend"), "tokens a second / fairseq lstm", "speed_ratio")
