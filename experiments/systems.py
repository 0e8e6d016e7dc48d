"""What is tuned in a character language model, and what is fixed: its cell, its parameters, its time."""

import bisect
import dataclasses
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from fairseq import options as fairseq_options

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from rhhn_fairseq.cells.registry import CELLS, cell_options
from rhhn_fairseq.cli.describe import count_parameters
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.models.char_lm import CharLM, CharLMConfig
from rhhn_fairseq.models.char_lm_table import BASE_RECIPE

with needed_for("experiments.tune needs"):
    from optuna.distributions import BaseDistribution
    from optuna.distributions import CategoricalDistribution as Choice
    from optuna.distributions import FloatDistribution as Real
    from optuna.distributions import IntDistribution as Whole

# Widths are multiples of this, as processors' vectors are.
WIDTH_STEP = 4
WIDEST = 8192
# The first updates of a training also set up memory and compiled code.
UNTIMED_UPDATES = 2
TIMED_UPDATES = 5


# By the names of fairseq-train's options. Those of cells apply to the cells that have them.
SPACE: dict[str, BaseDistribution] = {
    "lr": Real(5e-4, 1e-2, log=True),
    "batch_size": Choice((16, 32, 64)),
    "output_dropout": Real(0.0, 0.3),
    "layers": Whole(1, 2),
    "rhn_depth": Whole(1, 4),
    "hyper_size": Choice((32, 64, 128)),
    "recurrent_dropout": Real(0.0, 0.3),
    "zoneout": Real(0.0, 0.2),
}
# The values of the first trial.
START = {"lr": 3e-3, "batch_size": 32, "output_dropout": 0.0, "layers": 1}
START |= {"rhn_depth": 2, "hyper_size": 64, "recurrent_dropout": 0.0, "zoneout": 0.0}


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
        words = [f"--{word}" for word in rest.split(",") if word]
        parser = fairseq_options.get_training_parser()
        given = vars(
            fairseq_options.parse_args_and_arch(parser, [".", "--arch", "char_lm", "--cell", cell, *words])
        )
        options = {}
        for word in words:
            name = word.partition("=")[0].strip("-").replace("-", "_")
            options[name] = given[name][0] if isinstance(given[name], list) else given[name]
        system = cls(cell, options)
        # Wide enough for any hypernetwork. An option that the cell does not have is refused here.
        first = system.first_options()
        width = WIDTH_STEP * first.get("hyper_size", 1)
        build(first | {"hidden_size": width}, vocab_size=2, device="meta")
        return system

    @property
    def name(self) -> str:
        """The text that ``parse`` reads."""
        options = ",".join(f"{name.replace('_', '-')}={value}" for name, value in self.options.items())
        return f"{self.cell}:{options}" if options else self.cell

    def first_options(self) -> dict:
        """Returns the options of the first trial, without the width."""
        return {"cell": self.cell} | {name: START[name] for name in self.space()} | self.options

    def space(self) -> dict[str, BaseDistribution]:
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
            space["rhn_depth"] = Whole(2, SPACE["rhn_depth"].high)
        return space


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
