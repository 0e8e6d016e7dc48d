"""Training steps of character language models, compared with the same model with torch's LSTM as its layers.

A step is the model with the carried state, the loss, the backward pass and Adam, on random text.

Shapes: T time, B batch, C input, H hidden.
"""

import copy
import dataclasses
from dataclasses import dataclass

import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from torch import Tensor, nn

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from benchmarks.contenders import BASELINE, ORACLE_ROWS, check_backends, select_backends
from benchmarks.machine import DTYPES, MOST, BenchConfig, check_names, measuring, now
from benchmarks.parity import Contender, check, with_gradients
from benchmarks.report import make_report, start
from benchmarks.timing import Dictionaries, interleave, rows_of
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.registry import cell_options
from rhhn_fairseq.cli.describe import known_architectures
from rhhn_fairseq.criterions.char_cross_entropy import CharCrossEntropy
from rhhn_fairseq.models.char_lm import CharLM, CharLMConfig
from rhhn_fairseq.models.options import CELL_OPTIONS
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
    backends: tuple = option((), help="names of backends, separated by commas; none: all available")

    def __post_init__(self):
        super().__post_init__()
        known = [name for name in known_architectures() if issubclass(MODEL_REGISTRY[name], CharLM)]
        check_names("archs", self.archs, known)
        check_backends(self.backends)


SMOKE = dict(
    archs=("ln_hyperlstm_ptb",), vocab_size=12, hidden=16, hyper_size=8, batch=3, length=5, repeats=1
)


class Trainee:
    """A model with its optimizer, its carried state and the text it reads."""

    def __init__(self, contender: Contender, config: Config):
        self.contender = contender
        self.criterion = CharCrossEntropy(Dictionaries(Dictionary()))
        self.optimizer = torch.optim.Adam(contender.module.parameters(), lr=1e-3)
        self.carry, self.chunk, self.tokens = Carry(), 0, draw_text(config)

    def _loss(self, model: nn.Module, carry: Carry | None, rows: int) -> Tensor:
        """Returns the mean loss of the first rows of the text."""
        tokens = self.tokens[:rows]
        sample = {
            "net_input": {"src_tokens": tokens[:, :-1], "carry": carry},
            "target": tokens[:, 1:],
            "ntokens": tokens[:, 1:].numel(),
            "nsentences": len(tokens),
        }
        loss, count, _ = self.criterion(model, sample)
        return loss / count

    def time_step(self) -> float:
        """Runs a training step and returns its seconds."""
        device = self.tokens.device
        with self.contender.running() as model:
            start = now(device)
            self.optimizer.zero_grad()
            self._loss(model, self.carry.open(self.chunk), len(self.tokens)).backward()
            self.chunk += 1
            self.optimizer.step()
            return now(device) - start

    def results(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the loss and gradients of a model over a few rows, from the zero state."""
        model.zero_grad(set_to_none=True)
        loss = self._loss(model, None, ORACLE_ROWS)
        loss.backward()
        return with_gradients({"loss": loss.detach().double()}, model)


def draw_text(config: Config) -> Tensor:
    """Returns random text [B, T + 1] as dictionary indices: every symbol but the last is read."""
    special, draw = Dictionary().nspecial, torch.Generator().manual_seed(1)
    shape = (config.batch, config.length + 1)
    return torch.randint(special, special + config.vocab_size, shape, generator=draw).to(config.device)


def build_contenders(arch: str, config: Config) -> list[Contender]:
    """Returns an architecture with torch.nn.LSTM as its layers, then one per backend with equal weights."""
    sizes = {"hidden_size": config.hidden}
    if "hyper_size" in cell_options(MODEL_DATACLASS_REGISTRY[arch]().cell):
        sizes["hyper_size"] = config.hyper_size
    options = MODEL_DATACLASS_REGISTRY[arch](**{key: size for key, size in sizes.items() if size})
    torch.manual_seed(0)
    model = MODEL_REGISTRY[arch].for_vocabulary(options, config.vocab_size).to(config.device)
    # Residual connections stay; what only the architecture's cell has, such as its dropout, does not.
    shared = {spec.name: getattr(options, spec.name) for spec in dataclasses.fields(options)}
    shared = {name: value for name, value in shared.items() if name not in ("_name", "cell", *CELL_OPTIONS)}
    plain = CharLM.for_vocabulary(CharLMConfig(cell="lstm", **shared), config.vocab_size).to(config.device)

    def contender(key, master, forces):
        return Contender(key, master, copy.deepcopy(master).to(DTYPES[config.dtype]), config.dtype, forces)

    own = select_backends(arch, model.stack.cells[0], config, config.dtype)
    baseline = contender((BASELINE, f"torch, {arch}"), plain, "torch_nn")
    return [baseline, *(contender((arch, backend), model, backend) for backend in own)]


def run(config: Config) -> dict:
    """Checks and times every architecture on every backend, and its baseline.

    Raises:
        UsageError: a model gives wrong results, or its sizes cannot work.
    """
    with measuring(config):
        rows = []
        for arch in config.archs:
            contenders = build_contenders(arch, config)
            trainees = {contender.key: Trainee(contender, config) for contender in contenders}
            collect = next(iter(trainees.values())).results
            count = config.batch * config.length
            errors = check(contenders, collect)
            seconds = interleave(list(errors), config.repeats, lambda key, own=trainees: own[key].time_step())
            rows += rows_of(contenders, errors, seconds, count)
        return make_report("lm", config, rows)


if __name__ == "__main__":
    start(__name__)
