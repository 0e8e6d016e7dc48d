"""Stacks of recurrent layers: depth, directions, residual connections, dropout and masks, for any cell.

Shapes: T time, B batch, C input, H hidden.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rhhn_fairseq.cells.config import DEEPEST, WIDEST, check_fields, option
from rhhn_fairseq.cells.registry import CELLS, build_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.packed import Packed, run_reversed
from rhhn_fairseq.ops.loop import Noise, State
from rhhn_fairseq.ops.regularise import sequence_dropout


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Sizes and connections of a stack; ``UsageError`` names the invalid field."""

    cell: str = option(help=f"recurrent cell: {', '.join(sorted(CELLS))}")
    input_size: int = option(help="width of the input", low=1)
    hidden_size: int = option(help="width of a recurrent layer in one direction", low=1, high=WIDEST)
    layers: int = option(1, help="recurrent layers", low=1, high=DEEPEST)
    context_size: int = option(0, help="width of what every layer reads beside the one below", low=0)
    bidirectional_layers: int = option(
        0, help="how many of the first layers read in both directions and give both outputs", low=0
    )
    residual_from: int = option(
        0, help="first layer (counted from 1) whose input is added to its output; 0: none", low=0
    )
    input_dropout: float = option(0.0, help="dropout on the first layer's input", low=0, below=1)
    layer_dropout: float = option(0.0, help="dropout between layers", low=0, high=1)
    output_dropout: float = option(0.0, help="dropout on the last layer's output", low=0, below=1)
    weight_drop: float = option(
        0.0,
        help="drop connections of the recurrent matrices, others in every pass (Merity 2018)",
        low=0,
        below=1,
    )
    dropout_mask: str = option(
        "step",
        help="these dropouts draw a mask for every 'step' or every 'sequence'",
        choices=("step", "sequence"),
    )
    cell_options: dict = field(default_factory=dict)

    def __post_init__(self):
        check_fields(self)
        if self.bidirectional_layers > self.layers:
            raise UsageError(
                f"Stack: bidirectional_layers={self.bidirectional_layers} is more than layers={self.layers}"
            )
        if self.residual_from > self.layers:
            raise UsageError(
                f"Stack: residual_from={self.residual_from} is past the last of {self.layers} layers"
            )

    def check_feedback(self) -> None:
        """Raises UsageError for options that a stack whose first layer has feedback does not support."""
        name = type(self).__name__.removesuffix("Config")
        for field_name in ("bidirectional_layers", "weight_drop"):
            if value := getattr(self, field_name):
                raise UsageError(f"{name}: {field_name}={value} is not supported")
        if self.residual_from == 1:
            raise UsageError(f"{name}: residual_from=1 is too small, the smallest is 2")

    def upper(self, context_size: int) -> "StackConfig":
        """Returns the options of the layers above the first, which read its outputs and a context; output
        dropout is applied after them."""
        return StackConfig(
            cell=self.cell,
            input_size=self.hidden_size,
            hidden_size=self.hidden_size,
            layers=self.layers - 1,
            context_size=context_size,
            residual_from=max(0, self.residual_from - 1),
            input_dropout=self.layer_dropout,
            layer_dropout=self.layer_dropout,
            dropout_mask=self.dropout_mask,
            cell_options=self.cell_options,
        )

    def directions(self, layer: int) -> int:
        """Returns 2 for a layer (counted from 0) that reads in both directions, else 1."""
        return 2 if layer < self.bidirectional_layers else 1

    def layer_input(self, layer: int) -> int:
        """Returns the width of what a layer (counted from 0) reads from below, without the context."""
        return self.input_size if layer == 0 else self.hidden_size * self.directions(layer - 1)


class Layers(nn.Module):
    """What all stacks have in common.

    Attributes:
        output_size: width of the output.
        state_sizes: widths of the state's tensors, layer after layer, each in its cell's order.
    """

    config: StackConfig
    output_size: int
    state_sizes: tuple[int, ...]

    def each_cell(self) -> Sequence[Cell]:
        """Returns the forward cell of each layer."""
        raise NotImplementedError(f"{type(self).__name__} has no cells")

    def drop(self, x_TBC: Tensor, rate: float, packed: Packed | None = None) -> Tensor:
        """Applies dropout with masks as the configuration asks for."""
        # A rate of 1 drops all, whichever the mask; nothing is left to be scaled.
        per_sequence = self.config.dropout_mask == "sequence" and rate < 1
        if packed is None or not (per_sequence and self.training and rate):
            return sequence_dropout(x_TBC, rate, self.training, per_sequence)
        masks_BC = sequence_dropout(x_TBC.new_ones(1, packed.B, x_TBC.shape[-1]), rate, True, True)[0]
        return x_TBC * masks_BC[packed.rows].unsqueeze(1)

    def diagnostics(self) -> dict[str, float]:
        """The cells' diagnostics, by layer counted from 1."""
        return {
            f"layer{layer}_{key}": value
            for layer, cell in enumerate(self.each_cell(), start=1)
            for key, value in cell.diagnostics().items()
        }


class Stack(Layers):
    """Layers of one cell, each reading the output of the one below."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.config = config
        # Type checkers know the items of a ModuleList only as modules.
        self.cells: list[Cell] = nn.ModuleList()  # type: ignore[assignment]
        self.backward_cells: list[Cell] = nn.ModuleList()  # type: ignore[assignment]
        for layer in range(config.layers):
            width = config.layer_input(layer)
            output = config.hidden_size * config.directions(layer)
            if self._is_residual(layer) and width != output:
                raise UsageError(
                    f"Stack: residual_from={config.residual_from}, but layer {layer + 1} reads a width of "
                    f"{width} and gives {output}; a residual layer must give what it reads"
                )
            for cells in (self.cells, self.backward_cells)[: config.directions(layer)]:
                reads = width + config.context_size
                cells.append(build_cell(config.cell, reads, config.hidden_size, **config.cell_options))
        if config.weight_drop and not recurrent_weights(self.cells[0]):
            raise UsageError(
                f"Stack: weight_drop={config.weight_drop}, but the cell {config.cell} has no recurrent matrix"
            )
        self.output_size = output
        self.state_sizes = tuple(size for cell in self.cells for size in cell.state_sizes)

    def _is_residual(self, layer: int) -> bool:
        return 0 < self.config.residual_from <= layer + 1

    def forward(
        self,
        x_TBC: Tensor,
        state: State | None = None,
        mask_TB: Tensor | None = None,
        noise: list[Noise] | None = None,
        context_TBM: Tensor | None = None,
        drop_output: bool = True,
    ) -> tuple[Tensor, State]:
        """Runs all layers over a sequence; see ``Cell.forward`` for masks and states.

        Args:
            x_TBC: input [T, B, C].
            context_TBM: what every layer reads beside the output below it, [T, B, context_size]; residual
                connections exclude it.
            state: tensors [B, ·] in ``state_sizes`` order; None for zeros.
            mask_TB: bool [T, B], true at real positions.
            noise: one entry for each forward cell, then one for each backward cell; None lets every
                cell draw its own in training.
            drop_output: whether to apply the dropout on outputs; if False, the caller does.

        Returns:
            the last layer's outputs [T, B, output_size], zero at padding, and the next state of the
            forward cells.

        Raises:
            UsageError: a state is given to a stack with bidirectional layers, whose backward cells start at
                the end of the text; or shapes do not fit.
        """
        config = self.config
        if state is not None and config.bidirectional_layers:
            raise UsageError("Stack: a bidirectional layer cannot start from a state")
        if state is not None and len(state) != len(self.state_sizes):
            raise UsageError(f"Stack: state has {len(state)} tensors, expected {len(self.state_sizes)}")
        starts: list[State | None] = [None] * (len(self.cells) + len(self.backward_cells))
        used = 0
        for layer, cell in enumerate(self.cells):
            if state is not None:
                starts[layer] = tuple(state[used : used + len(cell.state_sizes)])
            used += len(cell.state_sizes)
        y, finals = self.run(x_TBC, starts, mask_TB, noise, context_TBM, drop_output)
        return y, tuple(tensor for final in finals[: config.layers] for tensor in final)

    def run(
        self,
        x_TBC: Tensor,
        starts: Sequence[State | None],
        mask_TB: Tensor | None = None,
        noise: list[Noise] | None = None,
        context_TBM: Tensor | None = None,
        drop_output: bool = True,
        resets_TB: Tensor | None = None,
        packed: Packed | None = None,
    ) -> tuple[Tensor, list[State]]:
        """Runs ``forward`` with a state for each cell; a backward cell's belongs to the end of the text.

        Args:
            starts: one entry for each forward cell, then one for each backward cell; None for zeros.
            resets_TB: where sequences start anew, see ``Cell.forward``.
            packed: where the steps of packed sequences lie; input, context and output are then [N, 1, ·],
                and there is neither a mask nor noise.

        Returns:
            the last layer's outputs [T, B, output_size], zero at padding, and the next state of each cell,
            in the order of ``starts``.
        """
        config = self.config
        y, finals, backward_finals = x_TBC, [], []
        for layer, cell in enumerate(self.cells):
            # A residual connection adds what the layer below gave, before dropout, as in NVIDIA's GNMT.
            below, read = y, self.drop(y, config.layer_dropout if layer else config.input_dropout, packed)
            read = read if context_TBM is None else torch.cat([read, context_TBM], dim=-1)
            inner = None if noise is None else noise[layer]
            y, final = self._call(cell, packed, False, read, starts[layer], mask_TB, inner, resets_TB)
            finals.append(final)
            if layer < config.bidirectional_layers:
                index = config.layers + layer
                inner = None if noise is None else noise[index]
                cell = self.backward_cells[layer]
                reverse, final = self._call(cell, packed, True, read, starts[index], mask_TB, inner, None)
                backward_finals.append(final)
                y = torch.cat([y, reverse], dim=-1)
            if self._is_residual(layer):
                y = y + below
                if mask_TB is not None:
                    y = y.masked_fill(~mask_TB.unsqueeze(-1), 0.0)
        return self.drop_output(y, packed) if drop_output else y, finals + backward_finals

    def drop_output(self, y_TBH: Tensor, packed: Packed | None = None) -> Tensor:
        """Applies dropout to the last layer's outputs."""
        return self.drop(y_TBH, self.config.output_dropout, packed)

    def each_cell(self):
        return self.cells

    def _call(self, cell: Cell, packed: Packed | None, reverse: bool, *arguments) -> tuple[Tensor, State]:
        """Returns a cell's outputs and the state after the last step, which is the first if reversed."""
        call: Callable = cell
        if self.training and self.config.weight_drop:
            call = with_dropped_weights(cell, self.config.weight_drop)
        if packed is not None:
            return packed.run(cell, call, reverse, *arguments)
        return run_reversed(call, *arguments) if reverse else call(*arguments)


class FeedbackStack(Layers):
    """A layer with feedback and a ``Stack`` above it, which reads what is fed back as its context.

    Attributes:
        upper: the layers above the first; None if there are none. first_state: number of the first's states.
    """

    upper: Stack | None
    first_state: int

    def build_upper(self, first: Any, config: StackConfig, context_size: int) -> None:
        """Builds the layers above ``first``, a module with ``state_sizes`` and ``cell``."""
        self.config, self.output_size = config, config.hidden_size
        self.upper = Stack(config.upper(context_size)) if config.layers > 1 else None
        self.state_sizes = (*first.state_sizes, *(self.upper.state_sizes if self.upper else ()))
        self.first_state = len(first.state_sizes)

    def split_state(self, state: State | None) -> tuple[State | None, State | None]:
        """Returns the states of the first layer and of those above it."""
        return (
            (None, None)
            if state is None
            else (tuple(state[: self.first_state]), tuple(state[self.first_state :]))
        )

    def run_upper(
        self, y_TBH: Tensor, low: State, high: State | None, mask_TB: Tensor | None, context_TBM: Tensor
    ) -> tuple[Tensor, State]:
        """Returns the outputs of the last layer and the state of all, from those of the first."""
        if self.upper is None:
            return y_TBH, low
        y_TBH, high = self.upper(y_TBH, high, mask_TB, context_TBM=context_TBM)
        return y_TBH, (*low, *high)


def with_dropped_weights(cell: Cell, rate: float) -> Callable:
    """Returns ``cell`` with each weight of its recurrent matrices set to zero with probability ``rate``, and
    the others divided by 1 - ``rate`` (Merity et al. 2018, section 2).

    One mask serves all steps of a pass, so the fused operations need no change.

    Raises:
        UsageError: pruning or a parametrization computes such a weight before each pass, and would again.
    """
    weights, known = recurrent_weights(cell), dict(cell.named_parameters()).keys()
    # A replica of torch.nn.DataParallel has no parameters.
    if known and (computed := weights.keys() - known):
        raise UsageError(
            f"{type(cell).__name__}: weight_drop is not possible on weights that are computed before a pass, "
            f"as by pruning or a parametrization: {', '.join(sorted(computed))}"
        )
    dropped = {name: F.dropout(weight, rate) for name, weight in weights.items()}
    return lambda *arguments: torch.func.functional_call(cell, dropped, arguments)


def recurrent_weights(cell: Cell) -> dict[str, Tensor]:
    """Returns by name the matrices that multiply a state of the cell, or of a cell inside it."""
    weights: dict[str, Tensor] = {}
    for prefix, module in cell.named_modules():
        named = module.weights_named("recurrent_weights") if isinstance(module, Cell) else {}
        for name, weight in named.items():
            path = f"{prefix}.{name}" if prefix else name
            if isinstance(weight, nn.ParameterList):
                weights |= {f"{path}.{i}": matrix for i, matrix in enumerate(weight)}
            else:
                weights[path] = weight
    return weights
