"""Generates the rows that the page shows: the symbols of a text, the points of a line of handwriting.

Shapes: M matrices that a hypernetwork generates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import nn

from rhhn_fairseq.data.strokes.points import Line
from rhhn_fairseq.data.text.vocabulary import CharVocabulary
from rhhn_fairseq.data.text.words import WordVocabulary, prompt_indices
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.generate.characters import SamplingConfig, draw
from rhhn_fairseq.generate.strokes import WritingConfig, collect, draw_points, matrix_names, stub
from rhhn_fairseq.inspection.changes import step_changes, watch
from rhhn_fairseq.inspection.colours import colour_limit
from rhhn_fairseq.inspection.weights import shown

# Lengths and prompts of the samples that measure a model's scale.
MEASURED_SYMBOLS, MEASURED_POINTS = 200, 200
# Drawings without a text that are measured, and the points of each.
MEASURED_DRAWINGS, DRAWING_POINTS = 4, 40
PROMPT, LINE = "def ", "hello world"


@dataclass(frozen=True)
class Models:
    """A character language model with its vocabulary, and models of strokes with and without texts."""

    characters: nn.Module
    vocabulary: CharVocabulary | WordVocabulary
    handwriting: nn.Module
    kanji: nn.Module


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
    model: nn.Module, text: str | None, config: WritingConfig, prime: Line | None = None, number: int = 0
) -> Iterator[dict]:
    """Yields the rows of a line of handwriting, after those of a line ``prime`` that the model reads first.

    Args:
        text: None without a window. number: of the line among those of its seed.

    Yields:
        rows with an offset ``dx``, ``dy`` in the corpus's units, y downwards, whether the pen is lifted after
        it (``pen``), and ``change``, the root mean square of the changes of the matrices in the step that
        drew it; then one row with the number of points at the end that form no stroke (``stub``), and whether
        the text was ``finished``.

    Raises:
        UsageError: the model does not know a character of the text, or the text is empty, or its window needs
            the text of the primed line.
    """
    if text is not None:
        unknown = sorted(set(text) - set(model.symbols))
        if unknown:
            raise UsageError(f"the model cannot write {''.join(unknown)!r}, only {model.symbols!r}")
        if not text:
            raise UsageError("the line is empty: the model needs a text to write")
    drawn = []
    for point, changes, place in draw_points(model, config, text, prime, number):
        drawn.append((point, changes, place))
        dx, dy, pen = point.tolist()
        change = float(np.sqrt(np.square(changes).mean())) if len(changes) else 0.0
        yield {"dx": _short(dx), "dy": _short(dy), "pen": int(pen > 0.5), "change": _short(change)}
    line = collect(model, drawn, text, prime)
    yield {"stub": stub(line) + len(drawn) - len(line.points), "finished": line.finished}


def drawing_rows(model: nn.Module, count: int, config: WritingConfig) -> Iterator[dict]:
    """Yields the rows of ``count`` drawings without a text, each with its row ``stub`` at the end."""
    return chain.from_iterable(line_rows(model, None, config, number=number) for number in range(count))


def measure(models: Models) -> dict:
    """Returns what the page needs to know of the models: descriptions, matrix names, scales, first texts."""
    rows = list(text_rows(models, "", MEASURED_SYMBOLS, SamplingConfig(temperature=0.7)))
    letters = models.handwriting.symbols
    line = LINE if set(LINE) <= set(letters) else letters.replace(" ", "")[:8]
    return {
        "text": {
            "model": _description(models.characters, models.vocabulary.corpus),
            "names": [name for layer in watch(models.characters.stack) for name in layer.names],
            "limit": colour_limit(np.array([row["changes"] for row in rows])),
            "prompt": PROMPT if _knows(models.vocabulary, PROMPT) else "",
        },
        "line": {"text": line} | _measure_strokes(models.handwriting, line),
        "drawings": _measure_strokes(models.kanji, None),
    }


def _measure_strokes(model: nn.Module, text: str | None) -> dict:
    """Returns the scale of colours, and the size of a letter or, without a text, of the largest drawing."""
    config = WritingConfig(bias=1.0, points=DRAWING_POINTS if text is None else None)
    changes, left, right, top, bottom = [], 0.0, 0.0, 0.0, 1.0
    for number in range(MEASURED_DRAWINGS if text is None else 1):
        rows = list(islice(line_rows(model, text, config, number=number), MEASURED_POINTS))[:-1]
        changes += [row["change"] for row in rows]
        x, y = (np.cumsum([row[axis] for row in rows]) for axis in ("dx", "dy"))
        left, right = min(left, x.min()), max(right, x.max())
        top, bottom = min(top, y.min()), max(bottom, y.max())
    return {
        "model": _description(model),
        "names": matrix_names(model),
        "limit": colour_limit(np.array(changes)),
        "width": float(right - left) / max(1, len(text or "")),
        "top": float(top),
        "bottom": float(bottom),
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
