"""Recurrent layers that read pen offsets and parametrise a mixture of Gaussians over the next offset.

Graves 2013 (arXiv 1308.0850), sections 4 and 5. With a window the network also reads a text, see
``layers/window.py``. Its outputs are the inputs of ``layers/mixture.py``.

Shapes: T time, B batch, M components, U positions of the text, V symbols.
"""

from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rhhn_fairseq.cells.contract import glorot_
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.mixture import output_size
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.layers.window import WindowConfig, WindowStack, one_hot
from rhhn_fairseq.saving import KINDS, Kind, Pretrained, Tensors

POINT_SIZE = 3


class StrokeNetwork(Pretrained, nn.Module):
    """See the module's docstring.

    The buffer ``statistics`` holds the normalisation of the offsets it was trained on, ``symbol_codes`` the
    code points of the characters it reads, none without a window.

    Args:
        stack: configuration of the layers; a ``WindowConfig`` for a network with a window.
        normalisation: of the offsets. symbols: the text's characters, in the network's order. mixtures: M.
    """

    kind = "strokes"
    symbol_codes: Tensor
    statistics: Tensor

    def __init__(self, stack: StackConfig, normalisation: Normalisation, symbols: str, mixtures: int):
        super().__init__()
        codes = torch.tensor([ord(symbol) for symbol in symbols], dtype=torch.long)
        self.register_buffer("symbol_codes", codes)
        self.register_buffer("statistics", torch.from_numpy(normalisation.to_bits()))
        self.mixtures = mixtures
        self.window = stack.window if isinstance(stack, WindowConfig) else 0
        self.stack = WindowStack(stack) if isinstance(stack, WindowConfig) else Stack(stack)
        self.weight_out = nn.Parameter(torch.empty(self.stack.output_size, output_size(mixtures)))
        self.bias_out = nn.Parameter(torch.zeros(output_size(mixtures)))
        glorot_(self.weight_out)

    def forward(self, points: Tensor, mask: Tensor | None = None, text: Tensor | None = None, state=None):
        """Returns the distribution of the point after each position.

        Args:
            points: normalised (dx, dy, pen bit) [B, T, 3].
            mask: bool [B, T], true at real positions; None if all are.
            text: indices into the symbols [B, U], -1 at padding and for unknown ones; required with a window,
                ignored without one.
            state: the state to start from, [B, ·] in the stack's order; None for zeros.

        Returns:
            the parameters of a mixture [B, T, 6 M + 1], see ``Mixture.of``; and a dictionary: the ``state``
            after the last position and, with a window, ``phi`` [B, T, U + 1], its weights over the text.

        Raises:
            UsageError: there is a window but no text.
        """
        x_TBC = points.transpose(0, 1).to(self.weight_out.dtype)
        mask_TB = None if mask is None else mask.T
        extra = {}
        if self.window:
            if text is None:
                raise UsageError("the model has a window and needs the text of every line")
            y, extra["state"], phi = self.stack(
                x_TBC, one_hot(text, len(self.symbol_codes), x_TBC.dtype), state, mask_TB
            )
            extra["phi"] = phi.transpose(0, 1)
        else:
            y, extra["state"] = self.stack(x_TBC, state, mask_TB)
        return F.linear(y, self.weight_out.T, self.bias_out).transpose(0, 1), extra

    @property
    def symbols(self) -> str:
        """The characters that the network reads, in its order; "" without a window."""
        return "".join(map(chr, self.symbol_codes.tolist()))

    @property
    def normalisation(self) -> Normalisation:
        """The normalisation of the offsets that the network reads and predicts."""
        return Normalisation.from_bits(self.statistics.cpu().numpy())


def _describe(network: StrokeNetwork) -> dict:
    return {"stack": asdict(network.stack.config), "mixtures": network.mixtures}


def _build(config: dict, tensors: Tensors) -> StrokeNetwork:
    stack = config.pop("stack")
    symbols = "".join(map(chr, tensors["symbol_codes"].tolist()))
    normalisation = Normalisation.from_bits(tensors["statistics"].cpu().numpy())
    kind = WindowConfig if "window" in stack else StackConfig
    return StrokeNetwork(kind(**stack), normalisation, symbols, **config)


KINDS["strokes"] = Kind(_describe, _build)
