"""Architectures, recipes, and fairseq's dataclasses of options, derived from what layers and cells declare.

An option is declared once, by ``options.option`` in the dataclass of the layer or the model that has it.

A recipe is a dictionary of fairseq's options by name, such as ``batch_size``, that apply unless the user
gives others (``rhhn_fairseq.compat.recipes``). The ``*_table.py`` files hold recipes next to architectures.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, register_model, register_model_architecture
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf

from rhhn_fairseq.cells.registry import CELLS, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.options import check_fields, option

Recipe = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One row of a table.

    Attributes:
        options: what differs from the model's defaults.
        parameters: the exact count for the vocabulary or the problem.
        vocab_size: entries of its vocabulary; None for a model that reads numbers.
        problem: the ``--problem`` that it is for, of a model of synthetic problems.
        source: paper and table, or the page with its training here; None if it is in neither.
        printed: the count as the paper prints it. valid, test: the paper's scores.
        figures: what the source reports, in words.
    """

    options: dict
    parameters: int
    vocab_size: int | None = None
    problem: str | None = None
    source: str | None = None
    printed: str | None = None
    valid: float | None = None
    test: float | None = None
    figures: str | None = None

    def reported(self) -> str | None:
        """Returns in one line what the source reports for it; None without a source."""
        if self.source is None:
            return None
        size = self.printed
        if size and self.vocab_size:
            size = f"{size} with {self.vocab_size:,} symbols"
        return f"{'; '.join(filter(None, (size, self.figures))) or 'no figures'} ({self.source})"


class HasRecipe:
    """A model with a ``stack`` and a recipe. Architectures are subclasses with a ``RECIPE`` of their own."""

    RECIPE: Recipe = {}

    @classmethod
    def recipe(cls, given: Mapping[str, object]) -> Recipe:
        """The recipe of the architecture. ``given`` holds the options that the user gave, by name."""
        return cls.RECIPE

    def diagnostics(self) -> dict[str, float]:
        """Returns figures about the weights for the log."""
        return self.stack.diagnostics()


STACK = (
    *("cell", "hidden_size", "layers", "residual_from"),
    *("input_dropout", "layer_dropout", "output_dropout", "dropout_mask"),
)
"""Options of ``layers.stack.StackConfig`` that models of one stack have."""


def fairseq_dataclass(name: str, module: str, declared: dict[type, Iterable[str] | None], **defaults) -> type:
    """Returns a dataclass for fairseq with options that others declare, and those of every cell.

    Args:
        name, module: of the new class.
        declared: dataclasses with the names of the fields to take; None takes all.
        defaults: by name, defaults in place of those declared.
    """
    specs = {
        spec.name: spec
        for kind, names in declared.items()
        for spec in dataclasses.fields(kind)
        if names is None or spec.name in names
    }
    own = [
        (
            key,
            spec.type,
            field(
                default=defaults.get(key, spec.default), metadata={**spec.metadata, "help": _text_of(spec)}
            ),
        )
        for key, spec in specs.items()
    ]
    options = [*own, *(spec for spec in _cell_fields() if spec[0] not in specs)]
    return dataclasses.make_dataclass(
        name, options, bases=(FairseqDataclass,), namespace={"__module__": module}
    )


def _cell_fields():
    """A field for every option of every registered cell; None leaves the cell's own default.

    The cell that is built checks their values, because limits may differ between cells.
    """
    # Type of an option, then its texts, then its defaults and the cells that have them.
    options: dict[str, tuple[type, dict[str, dict[str, list[str]]]]] = {}
    for name, entry in sorted(CELLS.items()):
        defaults = cell_options(name)
        for spec in dataclasses.fields(entry.config):
            # Switches are set by the names that stand for them, such as ln_lstm. No model has a condition.
            if spec.name in ("input_size", "hidden_size", "hyper_context") or spec.type is bool:
                continue
            _, texts = options.setdefault(spec.name, (spec.type, {}))
            default = defaults[spec.name]
            shown = f"{default:g}" if isinstance(default, float) else str(default).lower()
            texts.setdefault(_text_of(spec), {}).setdefault(shown, []).append(name)
    for name, (kind, texts) in options.items():
        help = "; ".join(f"{text}; default {_list_defaults(cells)}" for text, cells in texts.items())
        yield name, Optional[kind], option(None, help=help)


def _text_of(spec: dataclasses.Field) -> str:
    """Returns what an option does, and the words that it takes unless the text has them in quotes."""
    help, choices = spec.metadata["help"], spec.metadata["choices"] or ()
    return help if all(f"'{word}'" in help for word in choices) else f"{help}: {', '.join(choices)}"


def _list_defaults(cells_of: dict[str, list[str]]) -> str:
    return ", ".join(
        f"{default} ({'every cell' if len(names) == len(CELLS) else ', '.join(names)})"
        for default, names in cells_of.items()
    )


CELL_OPTIONS = [name for name, _, _ in _cell_fields()]


def taken(config, names: Iterable[str]) -> dict:
    """Returns the options of these names, and the cell's options that the configuration sets.

    Raises:
        UsageError: an option is not as declared; the cell is unknown, or does not have one of the options.
    """
    # Those of cells are checked when a cell is built.
    check_fields(config, flags=True)
    known = cell_options(config.cell)
    given = {name: getattr(config, name) for name in CELL_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in known:
            raise UsageError(
                f"{flag(name)} is not an option of the cell {config.cell}, it has "
                + ", ".join(flag(other) for other in sorted(known) if other in CELL_OPTIONS)
            )
    return {name: getattr(config, name) for name in names} | {"cell_options": given}


def flag(name: str) -> str:
    """Returns a field's name on the command line."""
    return "--" + name.replace("_", "-")


def register_architectures(
    rows: Mapping[str, Architecture], model: type, config: type, recipe_of: Callable[[str], Recipe]
) -> None:
    """Registers each architecture of a table as a separate model, so that --arch and Hydra build the same.

    Args:
        model: the class that they are subclasses of. config: that class's configuration.
        recipe_of: returns the training options of an architecture that apply unless the user gives others.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(config)}
    place = {"__module__": model.__module__}
    for name, row in rows.items():
        changed = [
            (key, specs[key].type, field(default=value, metadata=specs[key].metadata))
            for key, value in row.options.items()
        ]
        title = "".join(word.capitalize() for word in name.split("_"))
        own = dataclasses.make_dataclass(f"{title}Config", changed, bases=(config,), namespace=place)
        contents = {"__doc__": f"The architecture ``{name}``.", "RECIPE": recipe_of(name)} | place
        _register(name, type(title, (model,), contents), own)


class LateNode(ConfigNode):
    """An entry of Hydra's group ``model``, whose values are built when Hydra loads it.

    Building those of all architectures takes half a second, and every program would do it at its start.
    """

    def __copy__(self) -> ConfigNode:
        config = self.node()
        config._name = self.name.removesuffix(".yaml")
        return ConfigNode(self.name, OmegaConf.structured(config), self.group, self.package, self.provider)


def _register(name: str, model: type, config: type) -> None:
    """Does what ``register_model(name, dataclass=config)(model)`` does, with a ``LateNode``."""
    register_model(name)(model)
    setattr(model, "__dataclass", config)
    MODEL_DATACLASS_REGISTRY[name] = config
    register_model_architecture(name, name)(lambda _: None)
    node = LateNode(f"{name}.yaml", config, "model", None, "fairseq")
    ConfigStore.instance().repo["model"][node.name] = node
