"""What the models share: the cells' options as fields of a configuration, and their registration."""

import dataclasses
from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models import register_model

from rhhn_fairseq.cells.registry import CELLS, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.recipes import Recipe


@dataclass
class StackOptions(FairseqDataclass):
    """Options of a stack of layers, besides those of its cell."""

    layers: int = field(default=1, metadata={"help": "recurrent layers"})
    residual_from: int = field(
        default=0, metadata={"help": "first layer with a residual connection; 0: none"}
    )
    input_dropout: float = field(default=0.0, metadata={"help": "dropout on the first layer's input"})
    layer_dropout: float = field(default=0.0, metadata={"help": "dropout between layers"})
    output_dropout: float = field(default=0.0, metadata={"help": "dropout on the last layer's output"})
    dropout_mask: str = field(
        default="step",
        metadata={"help": "these dropouts draw a mask for every 'step' or every 'sequence'"},
    )


def _cell_fields():
    """A field for every option of every registered cell; None leaves the cell's own default."""
    # Type of an option, then its texts, then its defaults and the cells that have them.
    options: dict[str, tuple[type, dict[str, dict[str, list[str]]]]] = {}
    for name, entry in sorted(CELLS.items()):
        defaults = cell_options(name)
        for spec in dataclasses.fields(entry.config):
            # Switches are set by the names that stand for them, such as ln_lstm.
            if spec.name in ("input_size", "hidden_size") or spec.type is bool:
                continue
            _, texts = options.setdefault(spec.name, (spec.type, {}))
            default = defaults[spec.name]
            shown = f"{default:g}" if isinstance(default, float) else str(default).lower()
            texts.setdefault(_text_of(spec), {}).setdefault(shown, []).append(name)
    for option, (kind, texts) in options.items():
        help = "; ".join(f"{text}; default {_list_defaults(cells)}" for text, cells in texts.items())
        yield option, Optional[kind], field(default=None, metadata={"help": help})


def _text_of(spec: dataclasses.Field) -> str:
    """Returns what an option of a cell does, and the words that it takes."""
    choices = spec.metadata["choices"]
    return spec.metadata["help"] + (f": {', '.join(choices)}" if choices else "")


def _list_defaults(cells_of: dict[str, list[str]]) -> str:
    return ", ".join(
        f"{default} ({'every cell' if len(names) == len(CELLS) else ', '.join(names)})"
        for default, names in cells_of.items()
    )


CELL_OPTIONS = [name for name, _, _ in _cell_fields()]


def with_cell_options(name: str, base: type, module: str) -> type:
    """Returns a configuration class that adds a field for every option of every cell to ``base``."""
    return dataclasses.make_dataclass(name, _cell_fields(), bases=(base,), namespace={"__module__": module})


def given_cell_options(config) -> dict:
    """Returns the cell's options that the configuration sets.

    Raises:
        UsageError: the cell is unknown, or does not have one of the options.
    """
    known = cell_options(config.cell)
    given = {name: getattr(config, name) for name in CELL_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in known:
            raise UsageError(
                f"{flag(name)} is not an option of the cell {config.cell}, it has "
                + ", ".join(flag(option) for option in sorted(known) if option in CELL_OPTIONS)
            )
    return given


def stack_options(config) -> dict:
    """Returns the fields that a model's configuration and ``layers.stack.StackConfig`` have in common.

    Raises:
        UsageError: see ``given_cell_options``.
    """
    names = ("cell", "hidden_size", "layers", "residual_from", "dropout_mask")
    dropouts = ("input_dropout", "layer_dropout", "output_dropout")
    return {name: getattr(config, name) for name in names + dropouts} | {
        "cell_options": given_cell_options(config)
    }


def check_shapes(model, state_dict: dict, kind: str, place: str, advice: str) -> None:
    """Refuses a checkpoint whose weights differ from the model's in name or shape.

    Args:
        kind: what it may differ in. place: name of the model in the message.
        advice: what the user should give instead.

    Raises:
        UsageError: naming the first weight that differs.
    """
    own = model.state_dict()
    for key in sorted(own.keys() | state_dict.keys()):
        actual, expected = (tuple(d[key].shape) if key in d else None for d in (state_dict, own))
        if actual != expected:
            raise UsageError(
                f"the checkpoint is of another {kind}: {key} is {actual or 'missing'} there and "
                f"{expected or 'missing'} in {place}; give {advice}"
            )


def flag(name: str) -> str:
    """Returns a field's name on the command line."""
    return "--" + name.replace("_", "-")


def check_probability(config, name: str) -> float:
    """Returns the configuration's value of ``name``; raises UsageError unless it is in [0, 1)."""
    value = getattr(config, name)
    if not 0 <= value < 1:
        raise UsageError(f"{flag(name)} {value} is not in [0, 1)")
    return value


def register_architecture(
    name: str, defaults: dict, model: type, config: type, note: str, recipe: Recipe
) -> None:
    """Registers an architecture as a separate model, so that --arch and Hydra build the same model.

    Args:
        name: what --arch takes. defaults: fields of ``config`` whose defaults it changes.
        model: the class it is a subclass of. config: that class's configuration. note: its docstring.
        recipe: the training options that apply unless the user gives others.
    """
    specs = {spec.name: spec for spec in dataclasses.fields(config)}
    changed = [
        (key, specs[key].type, field(default=value, metadata=specs[key].metadata))
        for key, value in defaults.items()
    ]
    title = "".join(word.capitalize() for word in name.split("_"))
    place = {"__module__": model.__module__}
    own = dataclasses.make_dataclass(f"{title}Config", changed, bases=(config,), namespace=place)
    register_model(name, dataclass=own)(type(title, (model,), {"__doc__": note, "RECIPE": recipe} | place))
