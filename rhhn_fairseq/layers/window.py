"""Graves's window: a soft position in a text that only moves forward, fed back into the first layer.

Graves 2013 (arXiv 1308.0850), section 5.1, equations 46 to 51. From the output h of the first layer at step
t, with K Gaussians along the positions u = 1, 2, ... of a text of one-hot rows c_u::

    (a, b, k) = exp(h W + bias)
    kappa_t = kappa_{t-1} + k
    phi(t, u) = sum_K a exp(-b (kappa_t - u)^2)
    w_t = sum_u phi(t, u) c_u

The first layer reads [x_t; w_{t-1}], every layer above it [the one below; w_t]. Departures from the paper: no
skip connections from the input to all layers and from all layers to the output, so that models with and
without a window differ in the window alone. The bias of k starts so that the text is read at the speed of the
data, not at one character per step; a, b and k are clamped at exp(10).

Shapes: T time, B batch, C input, H hidden, U positions of the text, V symbols, K Gaussians.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.cells.registry import build_cell
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.feedback import run_with_feedback
from rhhn_fairseq.layers.stack import FeedbackStack, StackConfig
from rhhn_fairseq.ops.loop import Noise, State

LOG_LIMIT = 10.0

UNKNOWN = -1
"""Index of padding and of unknown characters; both become vectors of zeros."""


def one_hot(text_BU: Tensor, symbols: int, dtype: torch.dtype) -> Tensor:
    """Returns one-hot rows [B, U, V] of indices below ``symbols``, zeros for ``UNKNOWN``."""
    symbol = torch.arange(symbols, device=text_BU.device)
    return (text_BU.unsqueeze(-1) == symbol).to(dtype)


@dataclass(frozen=True, kw_only=True)
class WindowConfig(StackConfig):
    """A stack's options, whose layers include the first, and those of its window."""

    symbols: int = option(help="different characters, the width of the window", low=1)
    window: int = option(10, help="Gaussians of the window", low=1)
    points_per_symbol: float = option(25.0, help="steps a character takes at the start of training", low=0.1)
    window_start: str = option(
        "zeros",
        help="what the first step reads: zeros (Graves 2013), or the first character, so that a line's first "
        "stroke can depend on the text",
        choices=("zeros", "first"),
    )

    def __post_init__(self):
        super().__post_init__()
        self.check_feedback()
        if self.context_size:
            raise UsageError(f"Window: context_size={self.context_size}, but its one context is the window")


class Window(nn.Module):
    """The window's parameters and its step; see the module's docstring."""

    def __init__(self, config: WindowConfig):
        super().__init__()
        K = config.window
        self.weight = nn.Parameter(torch.empty(config.hidden_size, 3 * K))
        self.bias = nn.Parameter(torch.zeros(3 * K))
        nn.init.xavier_uniform_(self.weight)
        with torch.no_grad():
            # Small at the start, so that the speed is that of the data whatever the value of h.
            self.weight[:, 2 * K :] *= 0.1
            self.bias[2 * K :] = -math.log(config.points_per_symbol)

    def forward(self, y_BH: Tensor, kappa_BK: Tensor, text_BUV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns w [B, V], the next kappa [B, K] and phi [B, U + 1] for the first layer's output.

        The last column of phi is the position after the end of the padded text; writing uses it.
        """
        raw = torch.addmm(self.bias, y_BH, self.weight).to(kappa_BK.dtype)
        a, b, k = raw.clamp(max=LOG_LIMIT).exp().chunk(3, dim=-1)
        kappa_BK = kappa_BK + k
        U = text_BUV.shape[1]
        u = torch.arange(1, U + 2, device=y_BH.device, dtype=kappa_BK.dtype)
        exponent_BKU = (kappa_BK.unsqueeze(-1) - u).square() * b.unsqueeze(-1)
        phi_BU = (a.unsqueeze(-1) * torch.exp(-exponent_BKU)).sum(dim=1)
        w_BV = torch.bmm(phi_BU[:, None, :U].to(text_BUV.dtype), text_BUV).squeeze(1)
        return w_BV, kappa_BK, phi_BU


class WindowTrace(NamedTuple):
    """What a ``WindowCell`` returns beside outputs and state: w [T, B, V] and phi [T, B, U + 1]."""

    window_TBV: Tensor
    phi_TBU: Tensor


class WindowCell(nn.Module):
    """A cell that reads ``[x; w]``, where w is the window of its own previous output.

    Its state is the cell's, then w [B, V] and kappa [B, K]. See ``feedback`` for its loop.

    Args:
        cell: reads an input of width ``C + V``. window: has the same sizes.
    """

    def __init__(self, cell: Cell, window: Window, config: WindowConfig):
        super().__init__()
        self.cell, self.window, self.start = cell, window, config.window_start
        self.state_sizes = (*cell.state_sizes, config.symbols, config.window)

    def zero_state(self, B: int, device=None, dtype=None) -> State:
        """See ``Cell.zero_state``; the position is at least float32, as half precision loses its steps."""
        V, K = self.state_sizes[-2:]
        w = torch.zeros(B, V, device=device, dtype=dtype)
        wide = torch.promote_types(w.dtype, torch.float32)
        kappa = torch.zeros(B, K, device=device, dtype=wide)
        return *self.cell.zero_state(B, device, dtype), w, kappa

    def forward(
        self,
        x_TBC: Tensor,
        text_BUV: Tensor,
        state: State | None = None,
        mask_TB: Tensor | None = None,
        noise: Noise | None = None,
    ) -> tuple[Tensor, WindowTrace, State]:
        """Runs over a sequence; ``x_TBC``, ``state``, ``mask_TB`` and ``noise`` as in ``Cell.forward``.

        Args:
            text_BUV: one-hot rows; zeros at padding and for unknown characters.

        Returns:
            outputs [T, B, H], the window's trace and the state after the last step.
        """

        def step(advance, state, noise_t):
            *inner, w, kappa = state
            y_BH, new = advance(w, tuple(inner), noise_t)
            w, kappa, phi = self.window(y_BH, kappa, text_BUV)
            return (y_BH, w, phi), (*new, w, kappa)

        def start(B, device, dtype):
            *inner, w, kappa = self.zero_state(B, device, dtype)
            return *inner, text_BUV[:, 0].to(w) if self.start == "first" else w, kappa

        (y_TBH, *trace), state = run_with_feedback(self.cell, step, x_TBC, state, start, mask_TB, noise)
        return y_TBH, WindowTrace(*trace), state


class WindowStack(FeedbackStack):
    """Layers of one cell, the first of which moves a window along a text that all layers read."""

    def __init__(self, config: WindowConfig):
        super().__init__()
        reads = config.input_size + config.symbols
        cell = build_cell(config.cell, reads, config.hidden_size, **config.cell_options)
        self.first = WindowCell(cell, Window(config), config)
        self.build_upper(self.first, config, config.symbols)

    def each_cell(self):
        return [self.first.cell, *(self.upper.cells if self.upper else ())]

    def forward(
        self,
        x_TBC: Tensor,
        text_BUV: Tensor,
        state: State | None = None,
        mask_TB: Tensor | None = None,
    ) -> tuple[Tensor, State, Tensor]:
        """Outputs [T, B, H], the next state and phi [T, B, U + 1]; arguments as in ``WindowCell.forward``."""
        low, high = self.split_state(state)
        x_TBC = self.drop(x_TBC, self.config.input_dropout)
        y, trace, low = self.first(x_TBC, text_BUV, low, mask_TB)
        y, state = self.run_upper(y, low, high, mask_TB, trace.window_TBV)
        return self.drop(y, self.config.output_dropout), state, trace.phi_TBU
