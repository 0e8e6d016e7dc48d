"""Speed of translation models: training steps and beam search, beside fairseq's own ``lstm``.

Weights are random and lengths fixed, so that every model does the same number of steps: in training whole
batches of sentences of one length, in generation beams that may not end before the maximum length.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, lstm
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

from rhhn_fairseq.benchmark import describe_machine, interleave
from rhhn_fairseq.cells.base import check_fields, option
from rhhn_fairseq.describe import count_parameters, known_architectures
from rhhn_fairseq.errors import UsageError

FAIRSEQ = "fairseq lstm"


@dataclass(frozen=True, kw_only=True)
class TranslationBenchConfig:
    """What is measured; ``UsageError`` names the field that cannot be."""

    archs: tuple = option(("lstm_gnmt_small", "hyperlstm_gnmt_small"), help="architectures of this project")
    vocab_size: int = option(8000, help="entries of the dictionary", low=10)
    length: int = option(16, help="symbols of every sentence, source and target", low=1)
    sentences: int = option(128, help="sentences in a training batch", low=1)
    beam: int = option(5, help="width of the beam", low=1)
    repeats: int = option(5, help="rounds; in each every model runs once", low=1)
    seed: int = option(1, help="of weights and sentences")

    def __post_init__(self):
        check_fields(self)
        known = known_architectures()
        for arch in self.archs:
            if arch not in known or "gnmt" not in arch:
                names = ", ".join(name for name in known if "gnmt" in name)
                raise UsageError(f"--archs {arch} is no translation architecture, choose from {names}")


SMOKE = {"archs": ("lstm_gnmt_small",), "vocab_size": 20, "length": 3, "sentences": 2, "repeats": 1}


def build_fairseq(dictionary: Dictionary) -> nn.Module:
    """fairseq's ``lstm``: 2 + 2 layers, bidirectional encoder 2 x 256, decoder 512, embeddings 256."""
    encoder = lstm.LSTMEncoder(
        dictionary, embed_dim=256, hidden_size=256, num_layers=2, bidirectional=True,
        dropout_in=0.3, dropout_out=0.3,
    )  # fmt: skip
    decoder = lstm.LSTMDecoder(
        dictionary, embed_dim=256, hidden_size=512, out_embed_dim=512, num_layers=2,
        encoder_output_units=512, dropout_in=0.3, dropout_out=0.3,
    )  # fmt: skip
    return lstm.LSTMModel(encoder, decoder)


def build_models(config: TranslationBenchConfig) -> tuple[dict[str, nn.Module], Dictionary]:
    """All contenders by name, fairseq's first, and their dictionary."""
    dictionary = Dictionary()
    for n in range(config.vocab_size - dictionary.nspecial):
        dictionary.add_symbol(f"w{n}")
    task = _Dictionaries(dictionary)
    models = {}
    for name in (FAIRSEQ, *config.archs):
        torch.manual_seed(config.seed)
        if name == FAIRSEQ:
            models[name] = build_fairseq(dictionary)
        else:
            models[name] = MODEL_REGISTRY[name].build_model(MODEL_DATACLASS_REGISTRY[name](), task)
    return models, dictionary


class _Dictionaries:
    """What a model asks of a task."""

    def __init__(self, dictionary):
        self.source_dictionary = self.target_dictionary = dictionary
        self.cfg = None


def sentences(config: TranslationBenchConfig, dictionary: Dictionary, count: int) -> Tensor:
    """Random sentences [count, length], the last symbol of each its end."""
    draw = torch.Generator().manual_seed(config.seed)
    rows = torch.randint(dictionary.nspecial, len(dictionary), (count, config.length), generator=draw)
    rows[:, -1] = dictionary.eos()
    return rows


def time_training(model: nn.Module, tokens: Tensor) -> float:
    """Seconds of a forward and a backward pass; the source is also the target."""
    model.train()
    model.zero_grad()
    lengths = torch.full((len(tokens),), tokens.shape[1])
    start = time.perf_counter()
    logits = model(tokens, lengths, tokens.roll(1, dims=1))[0]
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    return time.perf_counter() - start


def time_generation(model: nn.Module, tokens: Tensor, dictionary: Dictionary, beam: int) -> float:
    """Seconds of a beam search that gives as many symbols as the source has."""
    length = tokens.shape[1]
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=length - 1, min_len=length - 1
    )
    lengths = torch.full((len(tokens),), length)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
    start = time.perf_counter()
    found = generator.generate([model], sample)
    seconds = time.perf_counter() - start
    assert all(len(hypotheses[0]["tokens"]) == length for hypotheses in found)
    return seconds


def run(config: TranslationBenchConfig) -> dict:
    """Measures all models in turn.

    Returns:
        the machine, and for each model its parameters, target symbols a second in training and in
        generation of 1 and of 64 sentences at a time, and the ratios of speeds to fairseq's ``lstm``:
        medians over the rounds.
    """
    models, dictionary = build_models(config)
    measures = {
        "training": (config.sentences, time_training),
        "generation of 1": (1, lambda m, x: time_generation(m, x, dictionary, config.beam)),
        "generation of 64": (64, lambda m, x: time_generation(m, x, dictionary, config.beam)),
    }
    rows = {name: {"parameters": count_parameters(model)} for name, model in models.items()}
    for title, (count, measure) in measures.items():
        tokens = sentences(config, dictionary, count)
        seconds = interleave(
            list(models), config.repeats, lambda name, m=measure, x=tokens: m(models[name], x)
        )
        for name, times in seconds.items():
            rows[name][title] = {
                "symbols_per_second": float(tokens.numel() / np.median(times)),
                "speed_ratio": float(np.median(seconds[FAIRSEQ] / times)),
            }
    return {"machine": describe_machine("cpu"), "models": rows}


def render(report: dict) -> str:
    """The report as a table in Markdown."""
    machine = report["machine"]
    lines = [", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    titles = [title for title in next(iter(report["models"].values())) if title != "parameters"]
    lines.append("| model | parameters | " + " | ".join(titles) + " |")
    lines.append("|---|---|" + "---|" * len(titles))
    for name, row in report["models"].items():
        found = (row[title] for title in titles)
        cells = [f"{cell['symbols_per_second']:,.0f}/s ({cell['speed_ratio']:.2f}x)" for cell in found]
        lines.append(f"| {name} | {row['parameters']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
