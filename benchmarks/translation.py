"""Training passes or beam search of translation models, compared with fairseq's own ``lstm``.

Weights are random and lengths fixed, so that every model does the same number of steps: in training all
sentences have one length, in generation no beam may end before the maximum length.
"""

import copy
import math
from dataclasses import dataclass

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, lstm
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from benchmarks.machine import DTYPES, MOST, BenchConfig, check_names, in_graphs, measuring, now
from benchmarks.parity import Contender, check, with_gradients
from benchmarks.report import make_report, start
from benchmarks.timing import Dictionaries, interleave, rows_of
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cells.selection import available_backends
from rhhn_fairseq.cli.describe import known_architectures
from rhhn_fairseq.errors import UsageError

FAIRSEQ, PREFERRED = "fairseq lstm", "preferred"

CHECKED = 8
"""Sentences that results of training are compared on."""

DECODED = (1, 64)
"""Numbers of sentences that are translated at a time."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    """What is measured; ``UsageError`` names a value that cannot work."""

    what: str = option(
        "train", help="train: forward, loss and backward; decode: beam search", choices=("train", "decode")
    )
    archs: tuple = option(
        ("lstm_gnmt_small", "hyperlstm_gnmt_small"), help="architectures of this project, separated by commas"
    )
    vocab_size: int = option(8000, help="entries of the dictionary", low=10, high=MOST)
    length: int = option(16, help="length of every sentence, source and target", low=1, high=MOST)
    sentences: int = option(128, help="sentences in a batch of a training", low=1)
    beam: int = option(5, help="width of the beam", low=1)
    attention: str = option(
        "own", help="attention form; with v2 every layer runs whole sequences", choices=("own", "paper", "v2")
    )
    dtype: str = option("float32", help="type of weights and activations", choices=tuple(DTYPES))
    backends: tuple = option(
        (),
        help="preferred, or names of backends, separated by commas; none: preferred and reference, on a GPU "
        "also those that run as CUDA graphs",
    )
    seed: int = option(1, help="seed of weights and sentences", low=0, high=2**63 - 1)

    def __post_init__(self):
        super().__post_init__()
        check_names("archs", self.archs, [name for name in known_architectures() if "gnmt" in name])
        # fairseq would search with a narrower one.
        if self.beam >= self.vocab_size:
            raise UsageError(
                f"--beam {self.beam} is too large, it must be below --vocab-size {self.vocab_size}"
            )


SMOKE = dict(archs=("lstm_gnmt_small",), vocab_size=20, length=3, repeats=1, sentences=2)


def build_fairseq(dictionary: Dictionary) -> nn.Module:
    """Builds fairseq's ``lstm``: 2 + 2 layers, bidirectional encoder 2 x 256, decoder 512, embeddings 256."""
    encoder = lstm.LSTMEncoder(
        dictionary, embed_dim=256, hidden_size=256, num_layers=2, bidirectional=True,
        dropout_in=0.3, dropout_out=0.3,
    )  # fmt: skip
    decoder = lstm.LSTMDecoder(
        dictionary, embed_dim=256, hidden_size=512, out_embed_dim=512, num_layers=2,
        encoder_output_units=512, dropout_in=0.3, dropout_out=0.3,
    )  # fmt: skip
    return lstm.LSTMModel(encoder, decoder)


def build_models(config: Config) -> tuple[dict[str, nn.Module], Dictionary]:
    """Returns all models by name, fairseq's first, and their dictionary."""
    dictionary = Dictionary()
    for n in range(config.vocab_size - dictionary.nspecial):
        dictionary.add_symbol(f"w{n}")
    models = {}
    for name in (FAIRSEQ, *config.archs):
        torch.manual_seed(config.seed)
        if name == FAIRSEQ:
            model = build_fairseq(dictionary)
        else:
            options = {} if config.attention == "own" else {"attention": config.attention}
            options = MODEL_DATACLASS_REGISTRY[name](**options)
            model = MODEL_REGISTRY[name].build_model(options, Dictionaries(dictionary))
        models[name] = model.to(config.device)
    return models, dictionary


def backends_of(model: nn.Module, config: Config) -> list[str]:
    """Returns the backends that a model is compared on; fairseq's runs on ``torch``.

    By default these are its cells' preferred backend, the reference, and on a GPU CUDA graphs.

    Raises:
        UsageError: its cells do not run on a requested backend.
    """
    cells = [module for module in model.modules() if isinstance(module, Cell)]
    if not cells:
        return ["torch"]
    of_cells = [available_backends(cell, config.device, DTYPES[config.dtype], padded=True) for cell in cells]
    common = [name for name in of_cells[0] if all(name in names for names in of_cells)]
    recorded = in_graphs(common, config.device)
    if config.backends:
        check_names("backends", config.backends, (PREFERRED, *common, *recorded))
    return list(config.backends) or [PREFERRED, *recorded, "reference"]


def draw_sentences(config: Config, dictionary: Dictionary, count: int) -> Tensor:
    """Returns random sentences [count, length], each with an end-of-sentence symbol last."""
    draw = torch.Generator().manual_seed(config.seed)
    rows = torch.randint(dictionary.nspecial, len(dictionary), (count, config.length), generator=draw)
    rows[:, -1] = dictionary.eos()
    return rows.to(config.device)


def loss_of(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean cross entropy and the logits [B, T, V]; the source is also the target."""
    lengths = torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
    logits = model(tokens, lengths, tokens.roll(1, dims=1))[0]
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), logits


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


def time_pass(model: nn.Module, tokens: Tensor, dictionary: Dictionary, config: Config) -> float:
    """Returns the seconds of a training pass or of a search."""
    model.train(config.what == "train").zero_grad()
    start = now(tokens.device)
    if config.what == "train":
        loss_of(model, tokens)[0].backward()
    else:
        search(model, tokens, dictionary, config.beam)
    return now(tokens.device) - start


def results(model: nn.Module, tokens: Tensor, dictionary: Dictionary, config: Config) -> dict[str, Tensor]:
    """Returns what is compared with float64: logits and gradients of a pass, or scores of a search.

    The scores are log-probabilities, relative to uniform, of the source's symbols in a search forced on
    them. It takes the same steps as the timed search, whose symbols may change with rounding. With random
    weights all symbols are almost equally likely, so errors show in the difference from uniform.
    """
    if config.what == "train":
        model.zero_grad(set_to_none=True)
        loss, logits = loss_of(model, tokens[:CHECKED])
        loss.backward()
        return with_gradients({"logits": logits.detach()}, model)
    # fairseq sums scores in float32 and takes differences of the sums.
    found = search(model, tokens, dictionary, config.beam, tokens[:, :-1])
    logarithms = torch.stack([hypotheses[0]["positional_scores"] for hypotheses in found])
    return {f"scores of {len(tokens)} sentences": logarithms + math.log(len(dictionary))}


def run(config: Config) -> dict:
    """Checks and times all models. Raises UsageError if one gives wrong results."""
    with measuring(config):
        masters, dictionary = build_models(config)
        contenders = []
        for name, master in masters.items():
            module = copy.deepcopy(master).to(DTYPES[config.dtype])
            for backend in backends_of(master, config):
                forces = None if backend in (PREFERRED, "torch") else backend
                contenders.append(Contender((name, backend), master, module, config.dtype, forces))
        by_key, rows = {contender.key: contender for contender in contenders}, []
        for count in (config.sentences,) if config.what == "train" else DECODED:
            tokens = draw_sentences(config, dictionary, count)

            def collect(model, tokens=tokens):
                return results(model, tokens, dictionary, config)

            def measure(key, tokens=tokens):
                with by_key[key].running() as model:
                    return time_pass(model, tokens, dictionary, config)

            # Of a training, source and target tokens are counted; of a search the target's.
            counted = tokens.numel() * (2 if config.what == "train" else 1)
            errors = check(contenders, collect)
            seconds = interleave(list(errors), config.repeats, measure)
            rows += [{"sentences": count} | row for row in rows_of(contenders, errors, seconds, counted)]
        return make_report(f"translation {config.what}", config, rows)


if __name__ == "__main__":
    start(__name__)
