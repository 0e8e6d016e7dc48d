"""The contract every recurrent cell keeps, and what all of them share.

Shapes: T time, B batch, C input, H hidden, G gates times H. Row vectors: an input [B, C] meets its
weight as ``x_BC @ W_CG``.

A cell owns its equations (``step``), the part of them that is affine in the input alone (``input_maps``)
and the part that never reads the main state (``prepare``). The loop over time, masks, carried state,
beam reordering and the choice of a faster implementation are written once, here and in ``kernels``.
"""

from dataclasses import MISSING, dataclass, field, fields

import torch
from torch import Tensor, nn

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.product import affine
from rhhn_fairseq.layers.regularisation import detach_by_coin, draw_mask, dropout

State = tuple[Tensor, ...]
Noise = dict[str, Tensor]
InputMap = tuple[Tensor, Tensor | None]


def option(default=MISSING, *, help, choices=None, low=None, high=None, below=None):
    """A field of a cell's configuration: its help string and the values it may take.

    Args:
        default: the value when none is given; left out, the field is required.
        help: one line for the command line.
        choices: the values allowed, for options of words.
        low: smallest value allowed. high: largest value allowed. below: every value is smaller.
    """
    limits = {"help": help, "choices": choices, "low": low, "high": high, "below": below}
    return field(default=default, metadata=limits)


@dataclass(frozen=True, kw_only=True)
class CellConfig:
    """Sizes and regularisers that every cell has; checked when built, ``UsageError`` names the field."""

    input_size: int = option(help="width of the input", low=1)
    hidden_size: int = option(help="width of the state and of the output", low=1)
    gal_dropout: float = option(
        0.0, help="drop recurrent inputs, one mask a sequence (Gal and Ghahramani)", low=0, below=1
    )
    zoneout: float = option(
        0.0, help="probability that a unit of the output state keeps its value", low=0, below=1
    )
    h_detach: float = option(
        0.0, help="probability a step that no gradient flows through the recurrent input", low=0, high=1
    )
    recompute_steps: int = option(
        0,
        help="to save memory, keep only the states between parts of so many steps and compute each part "
        "again in the backward pass; 0 keeps everything",
        low=0,
    )

    def __post_init__(self):
        check_fields(self)


def check_fields(config) -> None:
    """Raises UsageError for the first field made by ``option`` whose value it does not allow."""
    for spec in fields(config):
        if spec.metadata:
            _check_field(type(config).__name__, spec, getattr(config, spec.name))


def _check_field(owner: str, spec, value) -> None:
    """Raises UsageError unless ``value`` has the field's type and lies within its limits."""
    owner = owner.removesuffix("Config")
    where = f"{owner}: {spec.name}={value!r}" if owner else f"{spec.name}={value!r}"
    if spec.type is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise UsageError(f"{where} is not a whole number")
    if spec.type is float and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UsageError(f"{where} is not a number")
    limits = spec.metadata
    if limits["choices"] is not None and value not in limits["choices"]:
        raise UsageError(f"{where} is unknown, choose from {', '.join(limits['choices'])}")
    # Written as "not (a <= b)" so that NaN is refused as well.
    if limits["low"] is not None and not value >= limits["low"]:
        raise UsageError(f"{where} is too small, the smallest is {limits['low']}")
    if limits["high"] is not None and not value <= limits["high"]:
        raise UsageError(f"{where} is too large, the largest is {limits['high']}")
    if limits["below"] is not None and not value < limits["below"]:
        raise UsageError(f"{where} is too large, it must be below {limits['below']}")


class Cell(nn.Module):
    """A recurrent cell; see the module's docstring. Subclasses set ``state_sizes`` and ``step``.

    Attributes:
        config: the checked configuration.
        state_sizes: widths of the state's tensors, the first of which is the output.
        begins: whether the first step of a sequence that has no state is another one, see ``begin``.
    """

    state_sizes: tuple[int, ...]
    config: CellConfig
    begins: bool = False

    def __init__(self, config: CellConfig):
        super().__init__()
        self.config = config
        self.state_sizes = (config.hidden_size,)

    def input_maps(self) -> tuple[InputMap, ...]:
        """All that is affine in the input alone: a weight [C, ·] and a bias [·] or None for each part."""
        raise NotImplementedError(f"{type(self).__name__} has no input maps")

    def maps_of(self, columns: slice) -> tuple[InputMap, ...]:
        """The input maps of a slice of the input's columns; the bias goes with the slice that starts at 0.

        The shares of slices that cover the input add up to the whole projection. A loop takes its slices
        once, before it: the gradient of a slice fills the whole weight with zeros at every use.
        """
        first = columns.start in (None, 0)
        return tuple((weight[columns], bias if first else None) for weight, bias in self.input_maps())

    def project(self, x_TBC: Tensor) -> tuple[Tensor, ...]:
        """The input's part of every equation, [T, B, ·], in the order ``step`` takes them.

        One GEMM a weight for the whole sequence.
        """
        return apply_maps(x_TBC, self.input_maps())

    def begin(self, g: tuple[Tensor, ...], first_TB1: Tensor | None) -> tuple[Tensor, ...]:
        """Changes the projection of sequences that start without a state; by default, nothing.

        Args:
            first_TB1: what ``first_positions`` returns.
        """
        return g

    def first_positions(self, T: int, B: int, mask_TB: Tensor | None, device=None) -> Tensor | None:
        """Where sequences without a state have their first step, bool [T, B, 1].

        None unless ``begin`` asks for it.
        """
        if not self.begins:
            return None
        if mask_TB is None:
            mask_TB = torch.ones(T, B, dtype=torch.bool, device=device)
        return (mask_TB & (mask_TB.cumsum(0) == 1)).unsqueeze(-1)

    def prepare(
        self, g: tuple[Tensor, ...], state: State, mask_TB: Tensor | None, noise: Noise | None
    ) -> tuple[tuple[Tensor, ...], State]:
        """Runs whatever never reads the main state over the whole sequence; by default, nothing."""
        return g, state

    def sample_noise(self, T: int, B: int, device=None, generator=None) -> Noise:
        """Draws every random number of a training pass of T steps over B sequences.

        Returns:
            bool tensors [T or 1, B or 1, ·] by name: a leading 1 is one mask a sequence, [T, 1, 1] is
            one coin a time step. Empty when the configuration asks for no noise.
        """
        config, noise = self.config, {}
        H = config.hidden_size
        if config.gal_dropout:
            noise["gal"] = draw_mask((1, B, H), 1.0 - config.gal_dropout, device, generator)
        if config.zoneout:
            noise["zoneout"] = draw_mask((T, B, H), config.zoneout, device, generator)
        if config.h_detach:
            noise["h_detach"] = draw_mask((T, 1, 1), config.h_detach, device, generator)
        return noise

    def step(self, g_t: tuple[Tensor, ...], state: State, noise_t: Noise | None) -> tuple[Tensor, State]:
        """One time step, the paper's equations.

        Args:
            g_t: the projection at this step, tensors [B, ·].
            state: tensors [B, ·] in ``state_sizes`` order.
            noise_t: this step's share of ``sample_noise``; None in evaluation.

        Returns:
            the output [B, H] and the next state.
        """
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def forward(
        self,
        x_TBC: Tensor,
        state: State | None = None,
        mask_TB: Tensor | None = None,
        noise: Noise | None = None,
    ) -> tuple[Tensor, State]:
        """Runs the cell over a sequence.

        Args:
            x_TBC: input [T, B, C].
            state: the state to start from, tensors [B, ·] in ``state_sizes`` order; None for zeros.
            mask_TB: bool [T, B], true at real positions. At the others the state passes through
                unchanged and the output is zero, whatever the input holds there.
            noise: what ``sample_noise`` returned. When None it is drawn here if the cell is in
                training, and the pass is an evaluation if it is not.

        Returns:
            the outputs [T, B, H] and the state after the last step.

        Raises:
            UsageError: the input, state, mask or noise does not have the shape the cell was built for.
        """
        from rhhn_fairseq.kernels.recompute import in_parts

        self._check_shapes(x_TBC, state, mask_TB, noise)
        T, B, _ = x_TBC.shape
        if mask_TB is not None:
            # A NaN times a zero gradient is NaN, so padding is cleared before it meets a weight.
            x_TBC = x_TBC.masked_fill(~mask_TB.unsqueeze(-1), 0.0)
        if noise is None and self.training:
            noise = self.sample_noise(T, B, x_TBC.device)
        first = None
        if state is None:
            state = self.zero_state(B, x_TBC.device, x_TBC.dtype)
            first = self.first_positions(T, B, mask_TB, x_TBC.device)
        if 0 < self.config.recompute_steps < T and torch.is_grad_enabled():
            return in_parts(self, self.config.recompute_steps, x_TBC, state, first, mask_TB, noise)
        return self.run(x_TBC, state, first, mask_TB, noise)

    def run(
        self,
        x_TBC: Tensor,
        state: State,
        first_TB1: Tensor | None,
        mask_TB: Tensor | None,
        noise: Noise | None,
    ) -> tuple[Tensor, State]:
        """``forward`` when its arguments have been looked at: projection and the loop, on some backend."""
        from rhhn_fairseq.kernels import filled_up, scan, whole

        done = whole(self, x_TBC, state, mask_TB, noise)
        if done is not None:
            return done
        T = len(x_TBC)
        x_TBC, first_TB1, mask_TB, noise = filled_up(self, x_TBC, first_TB1, mask_TB, noise)
        g = self.project(x_TBC)
        if first_TB1 is not None:
            g = self.begin(g, first_TB1)
        g, state = self.prepare(g, state, mask_TB, noise)
        y_TBH, state = scan(self, g, state, mask_TB, noise)
        return y_TBH if len(x_TBC) == T else y_TBH[:T], state

    def recurrent_input(self, h_BH: Tensor, noise_t: Noise | None) -> Tensor:
        """The state as a matrix sees it: detached by the step's coin (h-detach), dropped out (Gal)."""
        h_BH = detach_by_coin(h_BH, noise_at(noise_t, "h_detach"))
        return dropout(h_BH, self.config.gal_dropout, noise_at(noise_t, "gal"))

    def zero_state(self, B: int, device=None, dtype=None) -> State:
        """The state of B sequences that have read nothing."""
        return tuple(torch.zeros(B, size, device=device, dtype=dtype) for size in self.state_sizes)

    def diagnostics(self) -> dict[str, float]:
        """Numbers about the trained weights worth a line in the log; by default, none."""
        return {}

    def _check_shapes(self, x_TBC, state, mask_TB, noise) -> None:
        name, C = type(self).__name__, self.config.input_size
        if x_TBC.dim() != 3 or x_TBC.shape[-1] != C:
            raise UsageError(f"{name}: input has shape {tuple(x_TBC.shape)}, expected [T, B, {C}]")
        T, B, _ = x_TBC.shape
        if T == 0 or B == 0:
            raise UsageError(f"{name}: input has shape {tuple(x_TBC.shape)}, T and B must be 1 or more")
        if state is not None:
            expected = [(B, size) for size in self.state_sizes]
            found = [tuple(part.shape) for part in state]
            if found != expected:
                raise UsageError(f"{name}: state has shapes {found}, expected {expected}")
        if mask_TB is not None and (mask_TB.shape != (T, B) or mask_TB.dtype != torch.bool):
            raise UsageError(
                f"{name}: mask is {mask_TB.dtype} of shape {tuple(mask_TB.shape)}, "
                f"expected torch.bool of shape {(T, B)}"
            )
        for key, part in (noise or {}).items():
            shape = tuple(part.shape)
            if len(shape) != 3 or shape[0] not in (1, T) or shape[1] not in (1, B):
                raise UsageError(f"{name}: noise {key!r} has shape {shape}, expected [{T} or 1, {B} or 1, ·]")


def detach_state(state: State) -> State:
    """The same state, cut from the graph: where truncated back-propagation stops."""
    return tuple(part.detach() for part in state)


def reorder_state(state: State, index_B: Tensor) -> State:
    """The state of the chosen sequences, as beam search asks for; ``index_B`` may repeat entries."""
    return tuple(part.index_select(0, index_B) for part in state)


def apply_maps(x: Tensor, maps: tuple[InputMap, ...]) -> tuple[Tensor, ...]:
    """``x W + b`` for each weight and bias; x is [..., C]."""
    return tuple(affine(x, weight, bias) for weight, bias in maps)


def noise_at(noise_t: Noise | None, name: str) -> Tensor | None:
    """One entry of a step's noise; None in evaluation and where none was asked for."""
    return None if noise_t is None else noise_t.get(name)


def orthogonal_(weight: Tensor, gates: int = 1) -> None:
    """Fills each of ``gates`` equal column blocks of ``weight`` [C, G] with an orthogonal matrix."""
    for block in weight.data.chunk(gates, dim=1):
        nn.init.orthogonal_(block)


def glorot_(weight: Tensor, gates: int = 1) -> None:
    """Glorot uniform, for each of ``gates`` column blocks of ``weight`` [C, G] by its own fan."""
    for block in weight.data.chunk(gates, dim=1):
        nn.init.xavier_uniform_(block)
