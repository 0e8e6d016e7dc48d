"""Shared by ``gnmt-train`` and ``gnmt-decode``: translation models and fairseq's own ``lstm``.

Weights are random and lengths fixed, so that every model does the same number of steps: in training all
sentences have one length, in generation no beam may end before the maximum length.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY, lstm
from torch import Tensor, nn

import rhhn_fairseq.plugin  # noqa: F401
from rhhn_fairseq.bench.machine import DTYPES, BenchConfig, check_distinct, cudnn_for, forced, in_graphs
from rhhn_fairseq.bench.parity import check_models, with_gradients
from rhhn_fairseq.bench.report import Column
from rhhn_fairseq.bench.timing import interleave, ratio
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.cells.selection import available_backends
from rhhn_fairseq.describe import count_parameters, known_architectures
from rhhn_fairseq.errors import UsageError

FAIRSEQ = "fairseq lstm"

CHECKED = 8
"""Sentences that results are compared on."""


@dataclass(frozen=True, kw_only=True)
class TranslationConfig(BenchConfig):
    """What is measured; ``UsageError`` names a value that cannot work."""

    archs: tuple = option(
        ("lstm_gnmt_small", "hyperlstm_gnmt_small"), help="architectures of this project, separated by commas"
    )
    vocab_size: int = option(8000, help="entries of the dictionary", low=10, high=10**6)
    length: int = option(16, help="length of every sentence, source and target", low=1, high=10**6)
    attention: str = option(
        "own", help="attention form; with v2 every layer runs whole sequences", choices=("own", "paper", "v2")
    )
    dtype: str = option("float32", help="type of weights and activations", choices=tuple(DTYPES))
    backends: tuple = option(
        (),
        help="preferred, or names of backends, separated by commas (default: preferred and reference, "
        "on a GPU also those that run as CUDA graphs)",
    )
    seed: int = option(1, help="seed of weights and sentences", low=0, high=2**63 - 1)

    def __post_init__(self):
        super().__post_init__()
        check_distinct("archs", self.archs)
        check_distinct("backends", self.backends)
        known = known_architectures()
        for arch in self.archs:
            if arch not in known or "gnmt" not in arch:
                names = ", ".join(name for name in known if "gnmt" in name)
                raise UsageError(f"--archs {arch} is not a translation architecture; choose from {names}")


SMOKE = dict(archs=("lstm_gnmt_small",), vocab_size=20, length=3, repeats=1)


def columns(tokens: str) -> tuple[Column, ...]:
    """Returns the columns of a report; ``tokens`` says which tokens are counted."""
    return (
        Column("model", "model"),
        Column("backend", "backend"),
        Column("type", "dtype"),
        Column("parameters", "parameters", ",d"),
        Column("sentences", "sentences", "d"),
        Column("ms", "total_ms", ".1f"),
        Column(f"{tokens} tokens/s", "tokens_per_second", ",.0f"),
        Column("speed / fairseq", "speed_ratio", ".2f"),
        Column("min..max", "speed_ratio_min speed_ratio_max", ".2f"),
        Column("speed / reference", "reference_ratio", ".2f"),
        Column("error", "error", ".1e"),
    )


PREFERRED = "preferred"
"""The backend that each cell of a model prefers."""


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


def build_models(config: TranslationConfig) -> tuple[dict[str, nn.Module], Dictionary]:
    """Returns all models by name, fairseq's first, and their dictionary."""
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
            options = {} if config.attention == "own" else {"attention": config.attention}
            models[name] = MODEL_REGISTRY[name].build_model(MODEL_DATACLASS_REGISTRY[name](**options), task)
        models[name].to(config.device)
    return models, dictionary


class _Dictionaries:
    """The attributes of a task that a model reads."""

    def __init__(self, dictionary):
        self.source_dictionary = self.target_dictionary = dictionary
        self.cfg = None


def backends_of(model: nn.Module, config: TranslationConfig) -> list[str]:
    """Returns the backends that a model is compared on; fairseq's runs on ``torch``.

    By default these are its cells' preferred backend and the reference, and on a GPU the backends whose loops
    can be recorded, as CUDA graphs; only the reference if no cell has another backend.

    Raises:
        UsageError: its cells do not run on a requested backend.
    """
    cells = [module for module in model.modules() if isinstance(module, Cell)]
    if not cells:
        return ["torch"]
    of_cells = [available_backends(cell, config.device, DTYPES[config.dtype], padded=True) for cell in cells]
    common = [name for name in max(of_cells, key=len) if all(name in names for names in of_cells)]
    recorded = in_graphs(common, config.device)
    for name in config.backends:
        if name not in (PREFERRED, *common, *recorded):
            backends = ", ".join((PREFERRED, *common, *recorded))
            raise UsageError(f"--backends {name} does not run all cells of a model, choose from {backends}")
    if config.backends:
        return list(config.backends)
    differs = any(len(names) > 1 for names in of_cells)
    return [PREFERRED, *recorded, "reference"] if differs else ["reference"]


def draw_sentences(config: TranslationConfig, dictionary: Dictionary, count: int) -> Tensor:
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


def results(model: nn.Module, tokens: Tensor, _: Dictionary) -> dict[str, Tensor]:
    """Returns the logits and gradients of a pass over the first sentences."""
    model.zero_grad(set_to_none=True)
    loss, logits = loss_of(model, tokens[:CHECKED])
    loss.backward()
    return with_gradients({"logits": logits.detach()}, model)


def compare(
    config: TranslationConfig, counts: tuple[int, ...], measure: Callable, check: Callable, counted: int
) -> list[dict]:
    """Returns the rows of a report: every model on its backends, for batches of several sizes.

    Args:
        counts: sentences in a batch. measure: maps a model, sentences and the dictionary to seconds.
        check: maps the same to tensors by name, which are compared with float64's.
        counted: number of tokens to count for each token of a target.

    Raises:
        UsageError: a model gives wrong results.
    """
    models, dictionary = build_models(config)
    pairs = [(name, kind) for name in models for kind in backends_of(models[name], config)]
    batches = {count: draw_sentences(config, dictionary, count) for count in counts}
    free = (PREFERRED, "torch")
    named = {(name, kind): (models[name], None if kind in free else kind) for name, kind in pairs}
    checks = {" ".join(pair): value for pair, value in named.items()}

    def collect(model):
        return {
            f"{name} of {count} sentences": result
            for count, tokens in batches.items()
            for name, result in check(model, tokens, dictionary).items()
        }

    errors = check_models(checks, collect, config.dtype)
    for model in models.values():
        model.to(DTYPES[config.dtype])
    rows = []
    for tokens in batches.values():

        def timed(pair, tokens=tokens):
            model, backend = named[pair]
            with forced(backend), cudnn_for(config.dtype):
                return measure(model, tokens, dictionary)

        seconds = interleave(pairs, config.repeats, timed)
        for pair in pairs:
            row = {"parameters": count_parameters(models[pair[0]]), "error": errors[" ".join(pair)]}
            rows.append(_row(pair, seconds, tokens, counted) | row | {"dtype": config.dtype})
    return rows


def _row(pair: tuple[str, str], seconds: dict, tokens: Tensor, counted: int) -> dict:
    """Returns the report's entry of one model on one backend, given the seconds of all."""
    own, (name, kind) = seconds[pair], pair
    # fairseq's seconds divided by the model's are the model's speed divided by fairseq's.
    speeds = {f"speed_{key}": value for key, value in ratio(seconds[FAIRSEQ, "torch"], own).items()}
    reference = seconds.get((name, "reference"))
    beside = None if reference is None or kind == "reference" else float(np.median(reference / own))
    return {
        "model": name,
        "backend": kind,
        "sentences": len(tokens),
        "total_ms": 1e3 * float(np.median(own)),
        "tokens_per_second": counted * tokens.numel() / float(np.median(own)),
        **speeds,
        "reference_ratio": beside,
        "seconds": own.tolist(),
    }
