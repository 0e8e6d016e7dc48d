"""Cells for a loop of your own, called as torch.nn.LSTMCell and torch.nn.GRUCell are: one for each layer.

Shapes: B batch, C input, H hidden.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import StateConfig
from rhhn_fairseq.cells.contract import Contract
from rhhn_fairseq.cells.hyper import DirectScaling, EmbeddedScaling
from rhhn_fairseq.cells.hyper_rnn import ScalingVectors
from rhhn_fairseq.cells.registry import build_cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.nn.arguments import remove_biases, renamed, sized_options
from rhhn_fairseq.nn.recurrent import RecurrentLayer
from rhhn_fairseq.ops.loop import State
from rhhn_fairseq.ops.matmul.quantised import QuantisedWeight


class StepCell(nn.Module):
    """One step of {layer}: ``state = {layer}Cell(5, 8)(x, state)``.

    Args:
        input_size: C. hidden_size: H. bias: whether there are biases. device, dtype: of the parameters.
        options: those of the layer's cell; see ``{layer}``.

    Called with x [B, C] or, for one sequence, [C], and a state. It has the entries of the layer's state, each
    [B, width] or [width], and is a tensor if there is one entry. None starts from zeros, and so do entries
    left out at the end. The new state is returned; its first entry is the output. In training, every call
    draws new noise.

    Raises:
        UsageError: a size or an option is impossible, or a shape does not fit.
    """

    layer: ClassVar[type[RecurrentLayer]]

    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, device=None, dtype=None, **options
    ):
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.options = options = sized_options(self.layer.cell, hidden_size, options)
        with torch.device(torch.get_default_device() if device is None else device):
            try:
                cell = build_cell(self.layer.cell, input_size, hidden_size, **options)
            except UsageError as error:
                raise renamed(error, type(self).__name__) from None
        if not bias:
            remove_biases(cell)
        self.cell = cell.to(dtype=dtype or torch.get_default_dtype())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises all weights again, as the methods of torch's cells do."""
        device = self.cell.input_maps()[0][0].device
        fresh = type(self)(self.input_size, self.hidden_size, self.bias, device, **self.options)
        for weight, new in zip(self.parameters(), fresh.parameters(), strict=True):
            weight.copy_(new)

    def forward(self, input: Tensor, hx: Tensor | State | None = None) -> Tensor | State:
        """Returns the state after a step; see the class."""
        if not isinstance(input, Tensor) or input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            given = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            C = self.input_size
            raise UsageError(f"{type(self).__name__}: input is {given}, expected [B, {C}] or [{C}]")
        x, state = input if input.dim() == 2 else input.unsqueeze(0), None
        if hx is not None:
            entries = (hx,) if isinstance(hx, Tensor) else hx
            if input.dim() == 1:
                entries = tuple(entry.unsqueeze(0) for entry in entries)
            missing = self.cell.state_sizes[len(entries) :]
            state = (*entries, *(x.new_zeros(len(x), size) for size in missing))
        first = None
        if self.cell.begins and state is not None:
            # A state of zeros has not begun, see ``RecurrentLayer``.
            first = torch.stack([(entry == 0).all(-1) for entry in state]).all(0).unsqueeze(0)
        try:
            if len(x):
                _, state = self.cell(x.unsqueeze(0), state, resets_TB=first)
            else:
                state = self.cell.zero_state(0, x.device, x.dtype)
        except UsageError as error:
            raise renamed(error, type(self).__name__) from None
        state = state if input.dim() == 2 else tuple(entry.squeeze(0) for entry in state)
        return state if len(state) > 1 else state[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cell.extra_repr()})"


def _cell_of(layer: type[RecurrentLayer]) -> type[StepCell]:
    name = f"{layer.__name__}Cell"
    doc = (StepCell.__doc__ or "").format(layer=layer.__name__)
    return type(name, (StepCell,), {"layer": layer, "__doc__": doc, "__module__": __name__})


STEP_CELLS = {f"{layer.__name__}Cell": _cell_of(layer) for layer in RecurrentLayer.__subclasses__()}
"""The classes by name, ``LSTMCell`` to ``NASCell``; ``rhhn_fairseq.nn`` has them too."""

globals().update(STEP_CELLS)


def safe_globals() -> list[type]:
    """Returns the classes in whole layers and cells, for ``torch.serialization.safe_globals``, with which
    ``torch.load`` reads what ``torch.save(layer, file)`` has written."""
    kinds: list[type] = [RecurrentLayer, StepCell, Contract, StateConfig, Stack, StackConfig]
    # The list grows while it is read.
    for kind in kinds:
        kinds += kind.__subclasses__()
    scalings = (ScalingVectors, EmbeddedScaling, DirectScaling)
    return [*kinds, nn.ModuleList, nn.ParameterList, *scalings, QuantisedWeight]
