"""Generates the rows that the page shows: the symbols of a text, the points of a line of handwriting.

Shapes: M matrices that a hypernetwork generates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.data.strokes.points import Line
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.data.text.words import WordVocabulary, prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.generate.characters import SamplingConfig, draw
from rhhn_fairseq.generate.strokes import WritingConfig, Written, draw_points, matrix_names, of_the_text, stub
from rhhn_fairseq.inspection.changes import step_changes, watch
from rhhn_fairseq.inspection.colours import colour_limit
from rhhn_fairseq.inspection.weights import shown

# Lengths and prompts of the samples that measure a model's scale.
MEASURED_SYMBOLS, MEASURED_POINTS = 200, 200
PROMPT, LINE = "def ", "hello world"


@dataclass(frozen=True)
class Models:
    """A character language model with its vocabulary, and a handwriting model; both on the CPU."""

    characters: nn.Module
    vocabulary: CharVocabulary | WordVocabulary
    strokes: nn.Module


@torch.no_grad()
def text_rows(models: Models, prompt: str, length: int, config: SamplingConfig) -> Iterator[dict]:
    """Yields rows for the prompt's symbols and for ``length`` sampled ones.

    Yields:
        the ``symbol``, its predicted ``probability``, how much each matrix changed when it was read
        (``changes``, M numbers), and whether it was ``given``.

    Raises:
        UsageError: the model does not know a symbol of the prompt.
    """
    entries = prompt_indices(models.vocabulary, prompt, "the prompt")
    model = models.characters.eval()
    watched = watch(model.stack)
    generator = torch.Generator().manual_seed(config.seed)
    dtype = next(model.parameters()).dtype
    before = tuple(torch.zeros(1, size, dtype=dtype) for size in model.stack.state_sizes)
    state = last = logits = None
    for number in range(len(entries) + length):
        given = number < len(entries)
        entry = entries[number] if given else int(draw(logits, config, generator))
        y, after = model.stack(model.embed(torch.tensor([[entry]])), state)
        factors = [layer.factors(before, after) for layer in watched]
        changes = step_changes(watched, factors, last or factors)
        # The first entry only sets the state.
        if number:
            probability = float(logits[0].double().softmax(dim=-1)[entry])
            yield {
                "symbol": shown(models.vocabulary, entry),
                "probability": _short(probability),
                "changes": [_short(change) for change in changes],
                "given": given,
            }
        before = state = after
        last, logits = factors, model.output(y[-1])


def line_rows(
    models: Models, text: str, config: WritingConfig, prime: Line | None = None
) -> Iterator[dict]:
    """Yields the rows of a line of handwriting, after those of a line ``prime`` that the model reads first.

    Yields:
        rows with an offset ``dx``, ``dy`` in the corpus's units, y downwards, whether the pen is lifted after
        it (``pen``), and ``change``, the root mean square of the changes of the matrices in the step that
        drew it; then one row with the number of points at the end that form no stroke (``stub``), and whether
        the text was ``finished``.

    Raises:
        UsageError: the model does not know a character of the text, or the text is empty, or its window needs
            the text of the primed line.
    """
    model = models.strokes
    if model.window:
        unknown = sorted(set(text) - set(model.symbols))
        if unknown:
            raise UsageError(f"the model cannot write {''.join(unknown)!r}, only {model.symbols!r}")
        if not text:
            raise UsageError("the line is empty: the model needs a text to write")
    points, finished = [], not model.window
    text = text if model.window else None
    for point, changes, past in draw_points(model, config, text, prime):
        points.append(point)
        finished = finished or past
        dx, dy, pen = point.tolist()
        change = float(np.sqrt(np.square(changes).mean())) if len(changes) else 0.0
        yield {"dx": _short(dx), "dy": _short(dy), "pen": int(pen > 0.5), "change": _short(change)}
    drawn = np.stack(points)
    if text is not None and finished:
        drawn = drawn[: of_the_text(drawn, model.symbols)]
    cut = bool(drawn[-1, 2] < 0.5)
    drawn[-1, 2] = 1
    line = Written(drawn, 0, text, finished, np.zeros((len(drawn), 0)), (), cut)
    yield {"stub": stub(line) + len(points) - len(drawn), "finished": finished}


def measure(models: Models) -> dict:
    """Returns what the page needs to know of the models: descriptions, matrix names, scales, first texts."""
    rows = list(text_rows(models, "", MEASURED_SYMBOLS, SamplingConfig(temperature=0.7)))
    strokes, letters = models.strokes, models.strokes.symbols
    line = LINE if set(LINE) <= set(letters) else "".join(filter(str.isalpha, letters))[:8]
    points = list(islice(line_rows(models, line, WritingConfig(bias=1.0)), MEASURED_POINTS))
    x = np.cumsum([row["dx"] for row in points if "dx" in row])
    y = np.cumsum([row["dy"] for row in points if "dy" in row])
    return {
        "text": {
            "model": _description(models.characters, models.vocabulary.corpus),
            "names": [name for layer in watch(models.characters.stack) for name in layer.names],
            "limit": colour_limit(np.array([row["changes"] for row in rows])),
            "prompt": PROMPT if _knows(models.vocabulary, PROMPT) else "",
        },
        "line": {
            "model": _description(strokes),
            "names": matrix_names(strokes),
            "limit": colour_limit(np.array([row["change"] for row in points if "change" in row])),
            "text": line if strokes.window else None,
            "width": float(np.ptp(x)) / max(1, len(line)),
            "top": float(y.min()),
            "bottom": max(float(y.max()), float(y.min()) + 1.0),
        },
    }


def _knows(vocabulary, text: str) -> bool:
    try:
        return bool(prompt_indices(vocabulary, text))
    except UsageError:
        return False


def _description(model: nn.Module, corpus: str | None = None) -> str:
    config = model.stack.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    layers = f"{config.layers} layers of " if config.layers > 1 else ""
    # Sizes follow the corpus's name.
    corpus = f"; {corpus.partition(',')[0]}" if corpus else ""
    return f"{config.cell}, {layers}{config.hidden_size} units, {weights:,} weights{corpus}"


def _short(number: float) -> float:
    """Rounds to five significant digits; the page shows three."""
    return float(f"{number:.5g}")
