"""The configuration of a cell: fields that carry a help string and limits, checked when it is built."""

from dataclasses import dataclass, fields
from typing import get_type_hints

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.regularise import LAYER_NORM_EPS
from rhhn_fairseq.options import check_fields, option

# Beyond these, the weights of one layer would fill terabytes.
WIDEST, DEEPEST = 10**6, 1000


@dataclass(frozen=True, kw_only=True)
class StateConfig:
    """Sizes and options of every cell. They are checked when built; ``UsageError`` names the field."""

    input_size: int = option(help="width of the input", low=1, high=WIDEST)
    hidden_size: int = option(help="width of the state and of the output", low=1, high=WIDEST)
    zoneout: float = option(
        0.0, help="probability that a unit of the output state keeps its value", low=0, below=1
    )
    recompute_steps: int = option(
        0,
        help="to save memory, keep only the states between segments of this many steps, and compute each "
        "segment again in the backward pass; 0 keeps everything",
        low=0,
    )

    def __post_init__(self):
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class CellConfig(StateConfig):
    """``StateConfig`` with the regularisers of states that enter a matrix product."""

    gal_dropout: float = option(
        0.0, help="drop recurrent inputs, one mask per sequence (Gal and Ghahramani)", low=0, below=1
    )
    h_detach: float = option(
        0.0, help="probability, per step, that no gradient flows through the recurrent input", low=0, high=1
    )


NORM_EPSILON = option(
    LAYER_NORM_EPS, help="added to the variance in layer normalisation; torch has 1e-5", low=1e-12
)
"""An option of every cell with layer normalisation."""


@dataclass(frozen=True, kw_only=True)
class ContextConfig(StateConfig):
    """Options of a cell with a hypernetwork that may read a condition beside the input."""

    hyper_context: int = option(
        0, help="width of the condition at the end of the input, which the hypernetwork alone reads", low=0
    )

    def __post_init__(self):
        super().__post_init__()
        if self.hyper_context >= self.input_size:
            raise UsageError(
                f"{type(self).__name__.removesuffix('Config')}: hyper_context={self.hyper_context} "
                f"leaves the main network nothing of input_size={self.input_size}"
            )

    @property
    def main_input_size(self) -> int:
        """Width of what the main network reads, the first columns of the input."""
        return self.input_size - self.hyper_context


def resolve_fields(config: type) -> None:
    """Gives every field of a configuration its type in place of an annotation in quotes.

    Raises:
        TypeError: a field was not made by ``option``.
    """
    hints = get_type_hints(config)
    for spec in fields(config):
        if "help" not in spec.metadata:
            raise TypeError(f"{config.__name__}.{spec.name}: use option(default, help=...) for every field")
        spec.type = hints[spec.name]


def describe_config(config: StateConfig) -> str:
    """Returns a configuration in one line: widths, depths, layer normalisation and changed options."""
    words = [str(config.input_size), str(config.hidden_size)]
    for spec in fields(config)[2:]:
        value = getattr(config, spec.name)
        if spec.name.endswith(("_size", "_depth", "layer_norm")) or value != spec.default:
            words.append(f"{spec.name}={value!r}")
    return ", ".join(words)
