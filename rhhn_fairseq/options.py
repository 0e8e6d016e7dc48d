"""Options: fields of a dataclass that carry a help string and limits, and the check of their values."""

import math
from dataclasses import MISSING, field, fields
from typing import get_args

from rhhn_fairseq.errors import UsageError


def option(default=MISSING, *, help, choices=None, low=None, high=None, below=None):
    """Returns a field of a configuration with a help string and limits on its values.

    It is the only declaration of an option: checks and command lines read it.

    Args:
        default: the default value; if it is left out, the field is required.
        help: one line for the command line.
        choices: the allowed values of an option that takes words.
        low: smallest allowed value. high: largest allowed value. below: exclusive upper limit.
    """
    limits = {"help": help, "choices": choices, "low": low, "high": high, "below": below}
    return field(default=default, metadata=limits)


def check_fields(config, flags: bool = False) -> None:
    """Raises UsageError for the first field made by ``option`` whose value it does not allow.

    Args:
        flags: whether the message names the option of the command line, and not the field.
    """
    owner = type(config).__name__.removesuffix("Config")
    for spec in fields(config):
        value = getattr(config, spec.name)
        if "low" in spec.metadata and value is not None:
            field = f"{spec.name}={value!r}"
            flag = f"--{spec.name.replace('_', '-')} {value}"
            _check_field(flag if flags else f"{owner}: {field}" if owner else field, spec, value)


def _check_field(where: str, spec, value) -> None:
    """Raises UsageError unless ``value`` has the field's type and lies within its limits."""
    kind = next((kind for kind in get_args(spec.type) if kind is not type(None)), spec.type)
    if kind is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise UsageError(f"{where} is not a whole number")
    if kind is bool and not isinstance(value, bool):
        raise UsageError(f"{where} is neither True nor False")
    if kind is float and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UsageError(f"{where} is not a number")
    if kind is float and not math.isfinite(value):
        raise UsageError(f"{where} is not a finite number")
    limits = spec.metadata
    if limits["choices"] is not None and value not in limits["choices"]:
        raise UsageError(f"{where} is unknown, choose from {', '.join(limits['choices'])}")
    if limits["low"] is not None and value < limits["low"]:
        raise UsageError(f"{where} is too small, the smallest is {limits['low']}")
    if limits["high"] is not None and value > limits["high"]:
        raise UsageError(f"{where} is too large, the largest is {limits['high']}")
    if limits["below"] is not None and value >= limits["below"]:
        raise UsageError(f"{where} is too large, it must be below {limits['below']}")
