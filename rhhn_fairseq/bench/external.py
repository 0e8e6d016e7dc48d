"""Recurrent layers of other packages, if they are installed: labml, FlashRNN and haste.

Each is called as its users would call it, and wrapped only to give input and output the shapes [T, B, C]
and [T, B, H].

Shapes: T time, B batch, C input, H hidden.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rhhn_fairseq.errors import UsageError


@dataclass(frozen=True)
class External:
    """A layer of another package.

    Attributes:
        package: the module that is imported. like: our cell with the same matrix products.
        build: builds the layer from the sizes of a benchmark.
        dtypes: types it runs in.
    """

    package: str
    like: str
    build: Callable[..., nn.Module]
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


class FlashLSTM(nn.Module):
    """FlashRNN's LSTM with one head, so with a full recurrent matrix, after a linear map of the input.

    In float64 it runs FlashRNN's own plain loop.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.input = nn.Linear(input_size, 4 * hidden_size, bias=False)
        self.weight_h = nn.Parameter(torch.randn(4, 1, hidden_size, hidden_size) / hidden_size**0.5)
        self.bias = nn.Parameter(torch.zeros(4, 1, hidden_size))

    def forward(self, x_TBC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs [T, B, H] and the last states."""
        flashrnn = importlib.import_module("flashrnn").flashrnn
        T, B, _ = x_TBC.shape
        g = self.input(x_TBC).transpose(0, 1).reshape(B, T, 4, 1, -1)
        backend = "vanilla" if x_TBC.dtype == torch.float64 else "cuda_fused"
        dtype = str(x_TBC.dtype).removeprefix("torch.")
        states, last = flashrnn(g, self.weight_h, self.bias, function="lstm", backend=backend, dtype=dtype)
        return states[0].squeeze(2).transpose(0, 1), last


def _labml(config) -> nn.Module:
    module = importlib.import_module("labml_nn.hypernetworks.hyper_lstm")
    return module.HyperLSTM(config.input, config.hidden, config.hyper_size, config.hyper_embed_size, 1)


def _haste(name: str) -> Callable:
    def build(config) -> nn.Module:
        # The layer creates its weights on the GPU; the benchmark moves layers there later.
        return getattr(importlib.import_module("haste_pytorch"), name)(config.input, config.hidden).cpu()

    return build


EXTERNALS = {
    "labml HyperLSTM": External("labml_nn", "ln_hyperlstm", _labml),
    "FlashRNN LSTM": External(
        "flashrnn", "lstm", lambda config: FlashLSTM(config.input, config.hidden), devices=("cuda",)
    ),
    "haste LSTM": External("haste_pytorch", "lstm", _haste("LSTM"), ("cuda",), ("float32",)),
    "haste LayerNormLSTM": External(
        "haste_pytorch", "ln_lstm", _haste("LayerNormLSTM"), ("cuda",), ("float32",)
    ),
}


def find_externals(device_type: str, path: str = "") -> dict[str, External]:
    """Returns the layers that are installed and run on a type of device, by their display names.

    Args:
        path: a directory with further packages; it stays on Python's path.

    Raises:
        UsageError: there is no such directory, or none of the packages in it.
    """
    if path:
        if not Path(path).is_dir():
            raise UsageError(f"--external-path {path}: is not a directory")
        packages = sorted({entry.package for entry in EXTERNALS.values()})
        if not any((Path(path) / package).exists() for package in packages):
            raise UsageError(f"--external-path {path}: holds none of {', '.join(packages)}")
        if path not in sys.path:
            # Last, so that installed packages take precedence.
            sys.path.append(path)
    return {
        name: entry
        for name, entry in EXTERNALS.items()
        if device_type in entry.devices and importlib.util.find_spec(entry.package) is not None
    }
