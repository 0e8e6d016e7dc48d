"""What is tuned in a character language model, and what is fixed: its cell, its parameters, its time."""

import bisect
import dataclasses
import time
import typing
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from rhhn_fairseq.cells.registry import CELLS, cell_options
from rhhn_fairseq.cli.describe import count_parameters
from rhhn_fairseq.compat import ranges
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.char_lm import CharLM, CharLMConfig
from rhhn_fairseq.models.char_lm_table import BASE_RECIPE
from rhhn_fairseq.models.options import CELL_OPTIONS

# Widths are multiples of this, as processors' vectors are.
WIDTH_STEP = 4
WIDEST = 8192
# The first updates of a training also set up memory and compiled code.
UNTIMED_UPDATES = 2
TIMED_UPDATES = 5


@dataclass(frozen=True)
class Dimension:
    """An option that is searched: its value in the first trial, and its range or its choices."""

    start: float
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple = ()

    def draw(self, trial, name: str):
        """Returns the value that an Optuna trial suggests."""
        if self.choices:
            return trial.suggest_categorical(name, self.choices)
        if isinstance(self.start, int):
            return trial.suggest_int(name, self.low, self.high)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


# By the names of fairseq-train's options. Those of cells apply to the cells that have them.
SPACE = {
    "lr": Dimension(3e-3, 5e-4, 1e-2, log=True),
    "batch_size": Dimension(32, choices=(16, 32, 64)),
    "output_dropout": Dimension(0.0, 0.0, 0.3),
    "layers": Dimension(1, 1, 2),
    "rhn_depth": Dimension(2, 1, 4),
    "hyper_size": Dimension(64, choices=(32, 64, 128)),
    "recurrent_dropout": Dimension(0.0, 0.0, 0.3),
    "zoneout": Dimension(0.0, 0.0, 0.2),
}

# What a system may also set: options of the task, of the criterion and of the training.
RECIPE = {
    "batching": str,
    "activation_reg": float,
    "temporal_activation_reg": float,
    "lr_scheduler": str,
    "warmup_updates": int,
    "weight_decay": float,
    "clip_norm": float,
}


@dataclass(frozen=True)
class System:
    """A cell, with the options that are not searched.

    Attributes:
        options: of ``fairseq-train --arch char_lm``, by name.
    """

    cell: str
    options: dict = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "System":
        """Reads ``CELL`` or ``CELL:option=value,option=value``.

        Raises:
            UsageError: no such cell or option, or a value that cannot work.
        """
        cell, _, rest = text.partition(":")
        if cell not in CELLS:
            raise UsageError(f"{text}: no cell {cell!r}, choose from {', '.join(sorted(CELLS))}")
        options = dict(_read_option(cell, word) for word in rest.split(",") if word)
        system = cls(cell, options)
        try:
            system.check()
        except UsageError as error:
            raise UsageError(f"{text}: {error}") from error
        return system

    @property
    def name(self) -> str:
        """The text that ``parse`` reads."""
        options = ",".join(f"{name.replace('_', '-')}={value}" for name, value in self.options.items())
        return f"{self.cell}:{options}" if options else self.cell

    def check(self) -> None:
        """Raises UsageError for options that no trial could be trained with."""
        start = {name: axis.start for name, axis in self.space().items()}
        options = {"cell": self.cell} | start | self.options
        # Wide enough for any hypernetwork.
        width = WIDTH_STEP * options.get("hyper_size", 1)
        build(options | {"hidden_size": width}, vocab_size=2, device="meta")

    def space(self) -> dict[str, Dimension]:
        """Returns what is searched: options of every model, and those of SPACE that the cell has.

        Depth means the cell's own, if it has one, else layers; of the cell's dropouts, one is searched.
        """
        known = cell_options(self.cell)
        if self.cell == "hyper":
            main = cell_options(self.options.get("main_cell", known["main_cell"]))
            known = {name: known[name] for name in known if name.startswith("hyper_") or name in main}
        names = ["lr", "batch_size", "output_dropout", "rhn_depth" if "rhn_depth" in known else "layers"]
        names += ["hyper_size"] if "hyper_size" in known else []
        names += next(([name] for name in ("recurrent_dropout", "zoneout") if name in known), [])
        space = {name: SPACE[name] for name in names if name not in self.options}
        if self.cell == "grid_rhn" and "rhn_depth" in space:
            # It has at least two layers.
            space["rhn_depth"] = dataclasses.replace(SPACE["rhn_depth"], low=2)
        return space


def _read_option(cell: str, word: str) -> tuple[str, object]:
    name, equals, value = word.partition("=")
    name = name.replace("-", "_")
    fields = {spec.name: spec.type for spec in dataclasses.fields(CharLMConfig)}
    fields |= RECIPE | {name: type(axis.start) for name, axis in SPACE.items() if name not in fields}
    known = [n for n in fields if n not in CELL_OPTIONS or n in cell_options(cell)]
    known = [n for n in known if n not in ("_name", "cell", "hidden_size")]
    if name not in known or not equals:
        raise UsageError(f"{cell}:{word}: expected OPTION=VALUE with one of {', '.join(sorted(known))}")
    # The fields of cells are Optional, so NoneType is left out.
    kinds = [kind for kind in typing.get_args(fields[name]) or (fields[name],) if kind is not type(None)]
    try:
        option = kinds[0](value)
    except ValueError as error:
        raise UsageError(f"{cell}:{word}: {value!r} is not of type {kinds[0].__name__}") from error
    ranges.check({name: option})
    return name, option


def build(options: dict, vocab_size: int, device: str = "cpu") -> CharLM:
    """Returns a model with these options of fairseq-train and random weights."""
    fields = {spec.name for spec in dataclasses.fields(CharLMConfig)}
    config = CharLMConfig(**{name: value for name, value in options.items() if name in fields})
    with torch.device(device):
        return CharLM.for_vocabulary(config, vocab_size)


def width_of(options: dict, parameters: int, vocab_size: int) -> int:
    """Returns the largest hidden size, a multiple of 4, with at most this many parameters.

    Raises:
        UsageError: the smallest model has more.
    """

    def count(width):
        return count_parameters(build(options | {"hidden_size": width}, vocab_size, "meta"))

    smallest = max(WIDTH_STEP, -(-options.get("hyper_size", 1) // WIDTH_STEP) * WIDTH_STEP)
    widths = range(smallest, WIDEST + 1, WIDTH_STEP)
    if count(smallest) > parameters:
        raise UsageError(
            f"--parameters {parameters:,}: {options['cell']} of width {smallest} has "
            f"{count(smallest):,} already"
        )
    return widths[bisect.bisect_right(widths, parameters, key=count) - 1]


def seconds_per_update(options: dict, vocab_size: int, length: int) -> float:
    """Returns the processor time of one update on random text, the least of a few, in seconds per thread.

    Processor time, because other programs may share the machine; one update is forward, backward and Adam.

    Args:
        length: symbols that each of ``batch_size`` lanes reads.
    """
    torch.manual_seed(0)
    model = build(options, vocab_size).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    entries = torch.randint(4, 4 + vocab_size, (options["batch_size"], length + 1))
    seconds = []
    for _ in range(UNTIMED_UPDATES + TIMED_UPDATES):
        start = time.process_time()
        logits, _ = model(entries[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), entries[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), BASE_RECIPE["clip_norm"])
        optimizer.step()
        seconds.append((time.process_time() - start) / torch.get_num_threads())
    return min(seconds[UNTIMED_UPDATES:])
