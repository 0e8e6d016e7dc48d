"""What the constructor of a layer does with its arguments beside the configurations."""

import itertools
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.registry import cell_options
from rhhn_fairseq.errors import UsageError


def sized_options(cell: str, hidden_size: int, options: dict) -> dict:
    """Returns a cell's options; a hypernetwork without a width gets a quarter of the layer's."""
    default = cell_options(cell).get("hyper_size")
    if isinstance(default, int) and isinstance(hidden_size, int) and options.get("hyper_size") is None:
        return options | {"hyper_size": min(default, max(1, hidden_size // 4))}
    return options


def remove_biases(module: nn.Module) -> None:
    """Replaces the biases of cells by zeros that are no parameters.

    The constants of maps to scaling vectors (``bias_z``, ``bias_rank``) stay: without them no signal passes.

    Raises:
        UsageError: a cell's ``transform_bias`` would be lost.
    """
    for cell in module.modules():
        if shift := getattr(getattr(cell, "config", None), "transform_bias", 0.0):
            raise UsageError(f"transform_bias={shift} has no effect with bias=False")
    for path, weight in list(module.named_parameters()):
        if re.search(r"(^|\.|_norm_)bias(_[nsxy])?(\.\d+)?$", path):
            place, _, name = path.rpartition(".")
            owner = module.get_submodule(place)
            delattr(owner, name)
            owner.register_buffer(name, torch.zeros_like(weight.detach()), persistent=False)


def renamed(error: UsageError, name: str) -> UsageError:
    """Returns an error that names the class that the user has built in place of a part of it."""
    return UsageError(f"{name}: " + re.sub(r"^\w+: ", "", error.args[0]))


def all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(module.named_parameters(), module.named_buffers())


def check_arguments(name: str, proj_size, switches: dict, num_layers, dropout) -> None:
    """Raises UsageError for arguments of a layer's constructor that the configurations do not check."""
    if proj_size:
        raise UsageError(
            f"{name}: proj_size={proj_size!r} is for LSTM; project the output by a torch.nn.Linear"
        )
    for flag, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}: {flag}={value!r} is neither True nor False")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise UsageError(f"{name}: num_layers={num_layers!r} is not a whole number of 1 or more")
    if not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
        raise UsageError(f"{name}: dropout={dropout!r} is not possible, it must be a number in [0, 1]")
