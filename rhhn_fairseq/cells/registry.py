"""The registry of cells: a new cell is one file with one ``@register_cell`` and one import line."""

from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields

from rhhn_fairseq.cells.config import StateConfig, resolve_fields
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError, nearest
from rhhn_fairseq.saving import KINDS, Kind, Tensors


@dataclass(frozen=True)
class CellEntry:
    """A cell in the registry.

    Attributes:
        cell: the class, or a function from a configuration to the cell. config: the configuration's class.
        naive: the paper's equations for one sequence in numpy, in float64:
            ``naive(parameters, config, x_TC, state, noise) -> (y_TH, state)``.
        tests: option sets beyond the defaults under which every property is checked.
        defaults: options that this name sets, where one class has several names.
    """

    cell: type[Cell]
    config: type[StateConfig]
    naive: Callable
    tests: tuple[dict, ...]
    defaults: dict


CELLS: dict[str, CellEntry] = {}


def register_cell(name: str, config: type[StateConfig], naive: Callable, tests=(), **defaults):
    """Decorator that enters a class or a function into ``CELLS`` under ``name``; see ``CellEntry``.

    Running its definition again, as in a notebook, replaces the cell.

    Raises:
        ValueError: another cell has this name.
        TypeError: a field of ``config`` was not made by ``option``.
    """
    resolve_fields(config)

    def enter(cell: type[Cell]) -> type[Cell]:
        if name in CELLS and _place(CELLS[name].cell) != _place(cell):
            raise ValueError(f"a cell named {name!r} is registered already: {CELLS[name].cell}")
        CELLS[name] = CellEntry(cell, config, naive, tuple(tests), defaults)
        return cell

    return enter


def _place(cell: type) -> tuple[str, str]:
    return cell.__module__, cell.__qualname__


def cell_options(name: str) -> dict[str, object]:
    """Returns the options of the cell ``name`` and their defaults, without the sizes of input and state.

    Raises:
        UsageError: no cell has that name.
    """
    entry = _entry(name)
    options = {spec.name: spec.default for spec in fields(entry.config) if spec.default is not MISSING}
    return options | entry.defaults


def build_cell(name: str, input_size: int, hidden_size: int, **options) -> Cell:
    """Builds the cell ``name``.

    Raises:
        UsageError: the name or an option is unknown (the message names valid ones), or a value is invalid.
    """
    entry = _entry(name)
    known = cell_options(name)
    for option in options:
        if option not in known:
            raise UsageError(f"cell {name} has no option {option!r}, it has {', '.join(sorted(known))}")
    return entry.cell(
        entry.config(input_size=input_size, hidden_size=hidden_size, **entry.defaults | options)
    )


def _entry(name: str) -> CellEntry:
    if name not in CELLS:
        hint = nearest(name, CELLS) or f"choose from {', '.join(sorted(CELLS))}"
        raise UsageError(f"unknown cell {name!r}, {hint}")
    return CELLS[name]


def _describe(cell: Cell) -> dict:
    """Returns a cell's name in the registry and all its options."""
    for name, entry in CELLS.items():
        if (
            entry.config is type(cell.config)
            and (not isinstance(entry.cell, type) or type(cell) is entry.cell)
            and all(getattr(cell.config, key) == value for key, value in entry.defaults.items())
        ):
            return {"cell": name} | asdict(cell.config)
    raise UsageError(f"save_pretrained: the cell {type(cell).__name__} is not in the registry")


def _build(config: dict, tensors: Tensors) -> Cell:
    return build_cell(config.pop("cell"), config.pop("input_size"), config.pop("hidden_size"), **config)


KINDS["cell"] = Kind(_describe, _build)
