"""Weights of torch.nn's recurrent layers for the layers with the same equations, and back.

Shapes: C input, H hidden, G gates times H.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.nn.describing import STACK

TORCH: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "elman": nn.RNN, "irnn": nn.RNN}
"""torch's layers by the cell with the same equations."""

MATRICES = {"weight_ih": "weight_x", "weight_hh": "weight_h", "weight_hr": "weight_r"}
BIASES = ("bias_ih", "bias_hh")
# Options that change no result of a trained layer, or that torch's layer has too.
CARRIED = "input_size hidden_size memory_size forget_bias activation identity_init recompute_steps".split()
SHARED = "input_size hidden_size num_layers bias batch_first dropout bidirectional proj_size".split()
"""Arguments that torch's layers have too."""


def constant_bias(cell: Any, bias_G: Tensor) -> Tensor:
    """Returns the constant that a cell adds to its bias: that of the forget gate, or zeros."""
    constant = torch.zeros_like(bias_G)
    if forget_bias := getattr(cell.config, "forget_bias", 0.0):
        constant.unflatten(0, (4, -1))[1] = forget_bias
    return constant


def take_torchs(state: dict[str, Tensor], prefix: str, place: str, path: str, cell: Any) -> None:
    """Gives torch's weights of a cell in a state_dict, such as ``weight_ih_l0``, the cell's names and layout.

    Args:
        prefix: of the layer's names. place: what torch's names end with. path: the cell's place in the layer.

    Raises:
        UsageError: without biases, the forget gate's constant differs from torch's, which is 0.
    """
    names = [name for name in (*MATRICES, *BIASES) if f"{prefix}{name}{place}" in state]
    theirs = {name: state.pop(f"{prefix}{name}{place}") for name in names}
    own = {MATRICES[name]: theirs[name].t().contiguous() for name in MATRICES if name in theirs}
    if not own:
        return
    if isinstance(cell.bias, nn.Parameter):
        ih, hh = (theirs.get(name, torch.zeros_like(cell.bias)) for name in BIASES)
        # The GRU's reset gate acts on the last third of the recurrent bias, which stays separate.
        count = len(cell.bias_n) if hasattr(cell, "bias_n") else 0
        own["bias"] = ih + nn.functional.pad(hh[: len(hh) - count], (0, count)) - constant_bias(cell, ih)
        if count:
            own["bias_n"] = hh[len(hh) - count :].clone()
    elif getattr(cell.config, "forget_bias", 0.0):
        raise UsageError("load_state_dict: without biases, torch's weights need a layer with forget_bias=0.0")
    else:
        own |= {name: theirs[name] for name in BIASES if name in theirs}
    state.update({f"{prefix}{path}.{name}": weight for name, weight in own.items()})


class TorchWeights:
    """Mixin of the layers: torch's names of their kind and weights, and torch's layers from and to them."""

    @property
    def mode(self: Any) -> str:
        """Name of the kind of layer, as of torch's: "LSTM", "GRU", "RNN_TANH"; else the class's."""
        activation = getattr(self.stack.cells[0].config, "activation", "")
        return f"RNN_{activation.upper()}" if TORCH.get(self.cell) is nn.RNN else type(self).__name__

    @property
    def all_weights(self: Any) -> list[list[nn.Parameter]]:
        """The parameters of each layer and direction, in torch's order of these."""
        return [list(cell.parameters()) for _, _, cell in self._places()]

    def _places(self: Any) -> Iterator[tuple[str, str, Cell]]:
        """Yields what torch's names of a cell's weights end with, where the cell is, and the cell."""
        for number in range(self.num_layers):
            yield f"_l{number}", f"stack.cells.{number}", self.stack.cells[number]
            if self.bidirectional:
                cell = self.stack.backward_cells[number]
                yield f"_l{number}_reverse", f"stack.backward_cells.{number}", cell

    def _load_from_state_dict(self: Any, state_dict, prefix, *arguments):
        if type(self).cell in TORCH:
            for place, path, cell in self._places():
                take_torchs(state_dict, prefix, place, path, cell)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *arguments)

    @classmethod
    @torch.no_grad()
    def from_torch(cls, module: nn.RNNBase, **options) -> Self:
        """Returns a layer that computes what torch's does, to rounding, with copies of its weights.

        ``LSTM``, ``GRU`` and ``Elman`` (torch.nn.RNN) have it. Frozen weights stay frozen. Two biases are
        summed into one. The constant forget bias is 0.

        Args:
            options: options of the cell, ``backend`` and ``lstm_state``.

        Raises:
            UsageError: torch's module has other equations; or an option is unknown, or the module's own.
        """
        layer: Any = cls
        kind = TORCH.get(layer.cell)
        if kind is None or not isinstance(module, kind):
            expected = f"a torch.nn.{kind.__name__}" if kind else "LSTM, GRU or Elman as the class"
            raise UsageError(f"{cls.__name__}.from_torch: expected {expected}, got {module!r}")
        own = {name: getattr(module, name) for name in SHARED if name != "proj_size" or module.proj_size}
        if kind is nn.RNN:
            own["activation"] = module.nonlinearity
        for name in own.keys() & options.keys():
            raise UsageError(f"{cls.__name__}.from_torch: {name} is the module's own, leave it out")
        weight = module.weight_ih_l0
        own |= {"dropout": module.dropout if module.num_layers > 1 else 0.0}
        own |= {"device": weight.device, "dtype": weight.dtype}
        copy = layer(**own, **({"forget_bias": 0.0} if kind is nn.LSTM else {}) | options)
        copy.load_state_dict(module.state_dict())
        sources = {own: (name,) for name, own in MATRICES.items()} | {"bias": BIASES, "bias_n": BIASES[1:]}
        for place, _, cell in copy._places():
            for name, weight in cell.named_parameters():
                theirs = [module.get_parameter(f"{source}{place}") for source in sources[name]]
                weight.requires_grad_(any(source.requires_grad for source in theirs))
        return copy.train(module.training)

    @torch.no_grad()
    def to_torch(self: Any) -> nn.RNNBase:
        """Returns torch's layer that computes what this one does, to rounding, with copies of its weights.

        Raises:
            UsageError: torch has no layer with this cell or with its options.
        """
        kind, config, cell = TORCH.get(type(self).cell), self.stack.config, self.stack.cells[0]
        given = {key: (getattr(config, key), spec.default) for key, spec in STACK.items()}
        given |= {"context_size": (self.context_size, 0), "initial_state": (self.initial_state, "zeros")}
        for spec in fields(cell.config):
            if spec.name not in CARRIED:
                given[spec.name] = getattr(cell.config, spec.name), spec.default
        lacking = [f"{key}={value!r}" for key, (value, default) in given.items() if value != default]
        if kind is None or lacking:
            name = f"{type(self).__name__}.to_torch"
            raise UsageError(f"{name}: torch has no layer with {lacking[0] if kind else 'this cell'}")
        own = {key: getattr(self, key) for key in SHARED if key != "proj_size" or self.proj_size}
        own["bias"] = self.bias or bool(getattr(cell.config, "forget_bias", 0.0))
        if kind is nn.RNN:
            own["nonlinearity"] = cell.config.activation
        weight = next(cell.parameters())
        module = kind(**own, device=weight.device, dtype=weight.dtype)
        for place, _, cell in self._places():
            for name, weight in MATRICES.items():
                if hasattr(cell, weight):
                    module.get_parameter(f"{name}{place}").copy_(getattr(cell, weight).t())
            if module.bias:
                first, second = (module.get_parameter(f"{name}{place}") for name in BIASES)
                first.copy_(cell.bias)
                second.copy_(constant_bias(cell, first))
                if hasattr(cell, "bias_n"):
                    second[-len(cell.bias_n) :] = cell.bias_n
        return module.train(self.training)
