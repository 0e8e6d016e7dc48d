"""One run of a row: its commands, its directory, and how it is scaled down."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fairseq.models import MODEL_REGISTRY

import rhhn_fairseq.plugin
from experiments.tables import Row, Table
from rhhn_fairseq.cli.describe import architecture_rows
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.programs import interpreter

USER_DIR = str(Path(rhhn_fairseq.__file__).resolve().parent)
# A scaled run keeps at least this width, batch and number of epochs.
SMALLEST_WIDTH, SMALLEST_BATCH, FEWEST_EPOCHS = 8, 4, 4
# The recipes of rows whose papers give no number of epochs say this or less.
ASSUMED_EPOCHS = 100

# A training stops at the first of its budget's limits that it reaches: options of fairseq-train by the limit.
LIMITS = {"epochs": "max_epoch", "updates": "max_update", "hours": "stop_time_hours", "patience": "patience"}

SCALING_RULE = (
    "hidden and hypernetwork widths (rounded down to multiples of 4), batch size, and the length of a text "
    f"of characters or of a problem times S; epochs times S squared, at least {FEWEST_EPOCHS}"
)


@dataclass(frozen=True)
class Run:
    """One training of a row.

    Attributes:
        scale: 1.0 for the paper's size. budget: numbers by the names of LIMITS.
        extra: further options of fairseq-train, as they are typed.
    """

    table: Table
    row: Row
    seed: int = 1
    scale: float = 1.0
    precision: str = "float32"
    budget: Mapping[str, float] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    def __post_init__(self):
        if not 0 < self.scale <= 1:
            raise UsageError(f"--scale {self.scale:g} is not in (0, 1]")

    @property
    def name(self) -> str:
        """The run's name below its table: the row, the scale where it is not 1, and the seed."""
        size = "" if self.scale == 1 else f"-x{self.scale:g}"
        return f"{self.row.name}{size}-s{self.seed}"

    def record(self, root: Path) -> Path:
        """The place of the run's record below a directory of tables."""
        return root / self.table.name / f"{self.name}.json"

    def options(self) -> dict[str, object]:
        """Returns the run's options of fairseq-train besides the recipe, without the data directory."""
        options: dict[str, object] = {"arch": self.row.arch} | dict(self.row.options)
        if self.scale < 1:
            options |= _scaled(self.row, self.scale)
        options |= {"seed": self.seed} | {LIMITS[name]: value for name, value in self.budget.items()}
        if self.precision == "bfloat16":
            options["bf16"] = True
        return options


def train_command(run: Run, place: Path | None, directory: Path, task: dict, device: str) -> list[str]:
    """Returns the command line of a run's training; run again, it resumes from its last checkpoint.

    Args:
        place: the data directory. directory: the run's. task: options that follow from the corpus.
        device: ``cpu`` or ``cuda``.
    """
    options = run.options() | task | {"save_dir": directory / "checkpoints", "log_format": "json"}
    return [*program("train", place, options | {"cpu": device == "cpu"}), *run.extra]


def evaluation_commands(run: Run, place: Path | None, directory: Path, device: str) -> dict[str, list[str]]:
    """Returns the command lines of a run's evaluations by the names of their figures."""
    scoring, commands = run.table.scoring, {}
    common = {"path": directory / "checkpoints" / "checkpoint_best.pt", "cpu": device == "cpu"}
    for figure, subset, protocol in scoring.figures():
        own = {
            "eval_lm": {"gen_subset": subset, "protocol": protocol},
            "validate": {"valid_subset": subset, "log_format": "json"},
            "generate": {"gen_subset": subset, "remove_bpe": "sentencepiece", "scoring": "sacrebleu"},
        }
        options = common | own[scoring.program] | scoring.options
        commands[figure] = program(scoring.program, place, options)
    return commands


def program(name: str, place: Path | None, options: dict[str, object]) -> list[str]:
    """Returns the command line of a program of fairseq on the data in ``place``.

    Of the options, True is a flag alone; None and False are left out.
    """
    words = interpreter("-m", f"fairseq_cli.{name}", "--user-dir", USER_DIR)
    words += [] if place is None else [str(place)]
    for option, value in options.items():
        if value is not None and value is not False:
            words.append("--" + option.replace("_", "-"))
            words += [] if value is True else [str(value)]
    return words


def _scaled(row: Row, scale: float) -> dict[str, object]:
    """Returns the options of a smaller run, by ``SCALING_RULE``."""
    sizes, recipe = architecture_rows()[row.arch].options, recipe_of(row)
    widths = {name: sizes[name] for name in ("hidden_size", "hyper_size") if sizes.get(name) is not None}
    options = {name: max(SMALLEST_WIDTH, 4 * math.floor(n * scale / 4)) for name, n in widths.items()}
    options["batch_size"] = max(SMALLEST_BATCH, round(recipe["batch_size"] * scale))
    epochs = row.epochs or recipe.get("max_epoch", ASSUMED_EPOCHS)
    options["max_epoch"] = max(FEWEST_EPOCHS, round(epochs * scale**2))
    if "length" in row.options:
        options["length"] = max(1, round(row.options["length"] * scale))
    return options


def recipe_of(row: Row) -> dict:
    """Returns the training options that the architecture of a row has, such as ``batch_size``."""
    return MODEL_REGISTRY[row.arch].recipe(row.options)
