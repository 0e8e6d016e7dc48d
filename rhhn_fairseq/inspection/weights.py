"""Measures how much the weights of a character language model change at each symbol that it reads.

Ha, Dai, Le 2016 (arXiv 1609.09106), figure 3, with the measure of ``changes``: the L2 norm of the difference
of a generated recurrent matrix between this step and the previous one. For a HyperRHN all depths are shown.

Shapes: T symbols, M matrices of all layers, N matrices of a layer, F factors of a matrix, K candidates.
"""

import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rhhn_fairseq.cells.hyper_rhn import HyperRHN
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.data.text.words import WordVocabulary
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.inspection.changes import generated
from rhhn_fairseq.inspection.colours import QUANTITY, colour_limit
from rhhn_fairseq.inspection.tracing import CellTrace, check_length, trace

CANDIDATES = 5
TEMPLATE = Path(__file__).with_name("weights.html")

FACTORS_AT_ONCE = 1 << 24
"""Number of factors of a layer's matrices, over the steps of a block, that are in memory at once."""


@dataclass(frozen=True)
class Reading:
    """A text and the effects of reading it, in the order of the text, whichever direction the model reads in.

    Attributes:
        symbols: the T symbols. names: of the M matrices, such as ``i``, or ``2 f`` in layer 2.
        changes: [T, M], how much each matrix changed in the step that read the symbol.
        probabilities: [T], the predicted probability of each symbol.
        candidates: for each symbol the K symbols predicted as most likely, in descending order.
        expected: [T, K], their probabilities.
    """

    symbols: tuple[str, ...]
    names: tuple[str, ...]
    changes: np.ndarray
    probabilities: np.ndarray
    candidates: tuple[tuple[str, ...], ...]
    expected: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns all attributes as arrays, by name."""
        return {name: np.asarray(value) for name, value in vars(self).items()}


def read_text(
    model: nn.Module, vocabulary: CharVocabulary | WordVocabulary, entries: Sequence[int]
) -> Reading:
    """Runs a model on a text.

    Args:
        model: has ``embed``, ``stack`` and ``output``, as ``CharLM`` does; it is put into evaluation mode.
        entries: T + 1 dictionary indices in the model's reading order; the first only sets the state.

    Raises:
        UsageError: there is no symbol or too many, or the model has no weights that change.
    """
    check_length(len(entries) - 1)
    traces, logits = trace(model, entries)
    names, changes = matrix_changes(traces)
    if not names:
        cells = sorted({type(each.cell).__name__ for each in traces})
        raise UsageError(f"the weights of {', '.join(cells)} do not change, or their change is not measured")
    # The prediction after the last symbol is not needed.
    probabilities = logits[:-1].double().softmax(dim=-1)
    came = torch.tensor(list(entries[1:]), device=logits.device)
    top = probabilities.topk(min(CANDIDATES, int(logits[0].isfinite().sum())), dim=-1)
    symbols = [shown(vocabulary, entry) for entry in entries[1:]]
    candidates = [tuple(shown(vocabulary, entry) for entry in row) for row in top.indices.tolist()]
    order = slice(None, None, -1 if vocabulary.reverse else 1)
    return Reading(
        tuple(symbols[order]),
        names,
        changes[order],
        probabilities.gather(1, came[:, None])[:, 0].cpu().numpy()[order],
        tuple(candidates[order]),
        top.values.cpu().numpy()[order],
    )


def shown(vocabulary: CharVocabulary | WordVocabulary, entry: int) -> str:
    """Returns a symbol as text; a byte outside of ASCII as an escape sequence."""
    symbol = vocabulary.decode([entry])
    if isinstance(symbol, bytes):
        return symbol.decode("ascii", "backslashreplace")
    return symbol


@torch.no_grad()
def matrix_changes(traces: Sequence[CellTrace]) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the names of the matrices that hypernetworks generate, and the norms [T - 1, M] of changes."""
    names: list[str] = []
    norms = []
    for each in traces:
        matrices = scaled_matrices(each)
        if matrices is None:
            continue
        own, sizes, factors = matrices
        names += [f"{each.number} {name}" if len(traces) > 1 else name for name in own]
        T, steps = len(each.x_TC), max(1, FACTORS_AT_ONCE // sizes.numel())
        blocks = [factors(slice(t, t + steps + 1)).diff(dim=1) for t in range(0, max(1, T - 1), steps)]
        norms.append(torch.cat([(block * sizes.unsqueeze(1)).norm(dim=-1) for block in blocks], dim=1))
    if not norms:
        return (), np.zeros((0, 0))
    return tuple(names), torch.cat(norms).T.double().cpu().numpy()


def scaled_matrices(
    step_trace: CellTrace,
) -> tuple[tuple[str, ...], Tensor, Callable[[slice], Tensor]] | None:
    """Returns the recurrent matrices that a cell's hypernetwork scaled in each step.

    Returns:
        their names, the norms [N, F] of what each factor scales, and a function from a slice of steps to the
        factors [N, T, F] without their constant part; None if nothing scales them.
    """
    cell = step_trace.cell
    matrices = generated(cell)
    if matrices is None:
        return None
    if isinstance(cell, HyperRHN):
        layers = [generated(cell, layer) for layer in range(cell.config.rhn_depth)]
        names = tuple(f"{half}{depth}" for depth in range(1, len(layers) + 1) for half in "ht")
        pairs = list(zip(layers, hyper_states(step_trace), strict=True))
        return (
            names,
            torch.cat([layer.sizes for layer in layers]),
            lambda steps: torch.cat([layer.factors((None, s_TN[steps])) for layer, s_TN in pairs]),
        )
    state = step_trace.before if matrices.late else step_trace.after
    return (
        matrices.names,
        matrices.sizes,
        lambda steps: matrices.factors(tuple(tensor[steps] for tensor in state)),
    )


@torch.no_grad()
def hyper_states(step_trace: CellTrace) -> list[Tensor]:
    """Returns the states [T, N] of a HyperRHN's hypernetwork after each layer; the cell keeps the last."""
    cell = step_trace.cell
    assert isinstance(cell, HyperRHN)
    g = cell.hyper.project(step_trace.x_TC)
    if cell.begins:
        first = torch.zeros(len(step_trace.x_TC), 1, dtype=torch.bool, device=g[0].device)
        first[0] = True
        g = cell.hyper.begin(g, first)
    return cell.hyper.layers(g, step_trace.before[1], None)


def weight_page(reading: Reading, title: str) -> str:
    """Returns the page: the text with a strip for each matrix, and the numbers of each symbol.

    Args:
        title: of the page, in plain text.
    """
    data = {
        "symbols": reading.symbols,
        "names": reading.names,
        "limit": colour_limit(reading.changes),
        "colours": QUANTITY,
        "changes": _rounded(reading.changes),
        "probabilities": _rounded(reading.probabilities),
        "candidates": reading.candidates,
        "expected": _rounded(reading.expected),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("__TITLE__", html.escape(title)).replace("__DATA__", embedded(data))


def embedded(data: Mapping) -> str:
    """Returns data as JSON for an element of a page; nothing in it can close the element."""
    return json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")


def _rounded(array: np.ndarray) -> list:
    """Returns the numbers with five significant digits; a page shows three."""
    return json.loads(json.dumps(array.tolist()), parse_float=lambda text: float(f"{float(text):.5g}"))
