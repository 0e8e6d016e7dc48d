"""``lm``: training steps of character language models, compared with the same model with torch.nn.LSTM.

A step is the model with the carried state, the loss, the backward pass and Adam, on random text.

Shapes: T time, B batch, C input, H hidden.
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import Tensor, nn

import rhhn_fairseq.plugin  # noqa: F401
from rhhn_fairseq.bench.contenders import BASELINE, MOST, select_backends
from rhhn_fairseq.bench.machine import (
    DTYPES,
    BenchConfig,
    check_distinct,
    cudnn_for,
    forced,
    lstm_algorithm,
    measuring,
    now,
)
from rhhn_fairseq.bench.parity import ORACLE_ROWS, check_models, with_gradients
from rhhn_fairseq.bench.report import Column, draw_bars, make_report
from rhhn_fairseq.bench.timing import interleave, ratio
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.registry import cell_options
from rhhn_fairseq.criterions.char_cross_entropy import CharCrossEntropy
from rhhn_fairseq.describe import count_parameters, known_architectures
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.models.char_lm import CharLM
from rhhn_fairseq.ops.loop import State
from rhhn_fairseq.ops.regularise import sequence_dropout
from rhhn_fairseq.tasks.carry import Carry


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    """What is timed; ``UsageError`` names a value that cannot work."""

    archs: tuple = option(("lstm_ptb", "ln_hyperlstm_ptb"), help="architectures, separated by commas")
    vocab_size: int = option(50, help="symbols in the vocabulary", low=2, high=MOST)
    hidden: int = option(0, help="width of the layers, 0 for the architecture's own", low=0, high=MOST)
    hyper_size: int = option(0, help="width of hypernetworks, 0 for the architecture's own", low=0, high=MOST)
    batch: int = option(128, help="lanes that the text is read in", low=1, high=MOST)
    length: int = option(100, help="symbols that each lane reads in an update", low=1, high=MOST)
    dtype: str = option("float32", help="type of weights and activations", choices=tuple(DTYPES))
    backends: tuple = option((), help="names of backends, separated by commas (default: all available)")

    def __post_init__(self):
        super().__post_init__()
        check_distinct("archs", self.archs)
        check_distinct("backends", self.backends)
        known = [name for name in known_architectures() if issubclass(MODEL_REGISTRY[name], CharLM)]
        for arch in self.archs:
            if arch not in known:
                names = ", ".join(known)
                raise UsageError(f"--archs {arch} is not a character language model; choose from {names}")


SMOKE = dict(
    archs=("ln_hyperlstm_ptb",), vocab_size=12, hidden=16, hyper_size=8, batch=3, length=5, repeats=1
)

COLUMNS = (
    Column("architecture", "arch"),
    Column("layer", "layer"),
    Column("backend", "backend"),
    Column("type", "dtype"),
    Column("parameters", "parameters", ",d"),
    Column("ms a step", "step_ms", ".1f"),
    Column("characters/s", "characters_per_second", ",.0f"),
    Column("speed / nn.LSTM", "speed_ratio", ".2f"),
    Column("min..max", "speed_ratio_min speed_ratio_max", ".2f"),
    Column("speed / reference", "reference_ratio", ".2f"),
    Column("error", "error", ".1e"),
)


class TorchStack(nn.Module):
    """torch.nn.LSTM in place of a ``Stack``, with the same width, depth and dropout between layers.

    Residual connections and a cell's own features, such as recurrent dropout, are left out.
    """

    def __init__(self, config: StackConfig):
        super().__init__()
        self.config = config
        self.lstm = nn.LSTM(
            config.input_size, config.hidden_size, config.layers, dropout=config.layer_dropout
        )

    def forward(
        self, x_TBC: Tensor, state: State | None = None, mask_TB=None, drop_output: bool = True
    ) -> tuple[Tensor, State]:
        """Like ``Stack.forward``, for text without padding."""
        y, after = self.lstm(self._drop(x_TBC, self.config.input_dropout), state)
        return self.drop_output(y) if drop_output else y, after

    def drop_output(self, y_TBH: Tensor) -> Tensor:
        """Like ``Stack.drop_output``."""
        return self._drop(y_TBH, self.config.output_dropout)

    def _drop(self, x_TBC: Tensor, rate: float) -> Tensor:
        return sequence_dropout(x_TBC, rate, self.training, self.config.dropout_mask == "sequence")


class Trainee:
    """A model with its optimizer, its carried state and the text it reads, on a backend.

    Attributes:
        layer: the cell or layer that its stack consists of. backend: the backend's name.
    """

    def __init__(self, model: nn.Module, layer: str, backend: str, config: Config):
        self.model, self.layer, self.backend = model, layer, backend
        self.forces, self.dtype = None if layer == BASELINE else backend, config.dtype
        self.criterion = CharCrossEntropy(_Dictionaries())
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.carry, self.chunk = Carry(), 0
        self.tokens = draw_text(config)

    def sample(self, carry: Carry | None, rows: int) -> dict:
        """Returns a batch of the first rows, as the task makes it."""
        tokens = self.tokens[:rows]
        count = tokens[:, 1:].numel()
        return {
            "net_input": {"src_tokens": tokens[:, :-1], "carry": carry},
            "target": tokens[:, 1:],
            "ntokens": count,
            "nsentences": len(tokens),
        }

    def time_step(self) -> float:
        """Runs a training step and returns its seconds."""
        self.model.train()
        device = self.tokens.device
        with forced(self.forces), cudnn_for(self.dtype):
            start = now(device)
            self.optimizer.zero_grad()
            sample = self.sample(self.carry.open(self.chunk), len(self.tokens))
            self.chunk += 1
            loss, count, _ = self.criterion(self.model, sample)
            (loss / count).backward()
            self.optimizer.step()
            return now(device) - start

    def results(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the loss and gradients of a model over a few rows, from the zero state."""
        model.zero_grad(set_to_none=True)
        loss, count, _ = self.criterion(model, self.sample(None, ORACLE_ROWS))
        (loss / count).backward()
        return with_gradients({"loss": loss.detach().double()}, model)


class _Dictionaries:
    """The attribute of a task that the criterion reads."""

    target_dictionary = Dictionary()


def draw_text(config: Config) -> Tensor:
    """Returns random text [B, T + 1] as dictionary indices: every symbol but the last is read."""
    special = _Dictionaries.target_dictionary.nspecial
    shape = (config.batch, config.length + 1)
    draw = torch.Generator().manual_seed(1)
    return torch.randint(special, special + config.vocab_size, shape, generator=draw).to(config.device)


def build_trainees(arch: str, config: Config) -> list[Trainee]:
    """Returns an architecture with torch.nn.LSTM as its layers, then one per backend with equal weights."""
    sizes = {"hidden_size": config.hidden}
    if "hyper_size" in cell_options(MODEL_DATACLASS_REGISTRY[arch]().cell):
        sizes["hyper_size"] = config.hyper_size
    options = MODEL_DATACLASS_REGISTRY[arch](**{key: size for key, size in sizes.items() if size})

    def build():
        torch.manual_seed(0)
        return MODEL_REGISTRY[arch].for_vocabulary(options, config.vocab_size)

    plain = build()
    plain.stack = TorchStack(plain.stack.config)
    plain.to(config.device)
    shape = (config.length, config.batch, plain.stack.config.input_size)
    x = torch.zeros(shape, device=config.device, dtype=DTYPES[config.dtype])
    with cudnn_for(config.dtype):
        algorithm = lstm_algorithm(copy.deepcopy(plain.stack).to(x.dtype), x)
    trainees = [Trainee(plain, BASELINE, algorithm, config)]
    cell = build().stack.cells[0]
    for backend in select_backends(arch, cell, config, config.dtype):
        trainees.append(Trainee(build().to(config.device), options.cell, backend, config))
    return trainees


def run(config: Config) -> dict:
    """Checks and times every architecture on every backend, and its baseline.

    Raises:
        UsageError: a model gives wrong results, its sizes cannot work, or memory runs out.
    """
    with measuring(config):
        trainees, errors = {}, {}
        for arch in config.archs:
            for trainee in build_trainees(arch, config):
                key = (arch, trainee.layer, trainee.backend)
                trainees[key] = trainee
                models = {" ".join(key): (trainee.model, trainee.forces)}
                errors[key] = check_models(models, trainee.results, config.dtype).popitem()[1]
                trainee.model.to(DTYPES[config.dtype])
        seconds = interleave(list(trainees), config.repeats, lambda key: trainees[key].time_step())
        rows = [_row(key, trainees[key], seconds, config) | {"error": errors[key]} for key in trainees]
        return make_report("lm", config, rows)


def _row(key: tuple, trainee: Trainee, seconds: dict, config: Config) -> dict:
    """Returns the report's entry of one model, given the seconds of all."""
    arch, layer, backend = key
    baseline = next(other for other in seconds if other[:2] == (arch, BASELINE))
    # The baseline's seconds divided by the model's are the model's speed divided by the baseline's.
    speeds = {f"speed_{name}": value for name, value in ratio(seconds[baseline], seconds[key]).items()}
    reference = seconds.get((arch, layer, "reference"))
    beside = None if reference is None or backend == "reference" else np.median(reference / seconds[key])
    return {
        "arch": arch,
        "layer": layer,
        "backend": backend,
        "dtype": config.dtype,
        "parameters": count_parameters(trainee.model),
        "step_ms": 1e3 * float(np.median(seconds[key])),
        "characters_per_second": config.batch * config.length / float(np.median(seconds[key])),
        **speeds,
        "reference_ratio": None if beside is None else float(beside),
        "seconds": seconds[key].tolist(),
    }


def draw(report: dict):
    """Returns a bar chart of the speeds relative to torch.nn.LSTM's."""
    return draw_bars(report, ("arch", "layer", "backend"), "characters a second / nn.LSTM", "speed_ratio")
