"""How much the weights change while a character language model reads a text, as a picture.

Shapes: T characters, M matrices of all layers.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.lines import replacing
from rhhn_fairseq.writing.changes import step_changes, watch

with needed_for("the picture needs"):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure


@torch.no_grad()
def read_changes(model: torch.nn.Module, entries: Sequence[int]) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of the matrices, and the norms [T, M] of what each character changed in them.

    Args:
        model: has ``embed`` and ``stack``, as ``CharLM`` does. entries: T + 1 dictionary indices, the
            first of which only sets the state.
    """
    watched = watch(model.stack)
    state, rows, last = None, [], None
    for entry in entries:
        before = state
        _, state = model.stack(model.embed(torch.tensor([[entry]])), state)
        now = [layer.factors(state if before is None else before, state) for layer in watched]
        if last is not None:
            rows.append(step_changes(watched, now, last))
        last = now
    return tuple(name for layer in watched for name in layer.names), np.array(rows)


def draw_reading(text: str, names: Sequence[str], changes: np.ndarray, path: str | Path) -> None:
    """Writes a PNG: the characters from left to right, under each how much the matrices changed.

    Args:
        text: T characters. names, changes: what ``read_changes`` returns. path: the file.
    """
    figure = Figure(figsize=(max(6.0, 0.16 * len(text)), 1.2 + 0.3 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    highest = float(np.percentile(changes, 99)) or 1.0
    image = axes.imshow(changes.T, aspect="auto", cmap="YlOrRd", vmin=0.0, vmax=highest)
    shown = [" " if character.isspace() else character for character in text]
    axes.set_xticks(range(len(text)), shown, family="monospace", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylabel("gate")
    axes.tick_params(length=0)
    axes.set_title("Change of the recurrent weights while the model reads", fontsize=10)
    figure.colorbar(image, ax=axes, label="norm", extend="max")
    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    with replacing(path) as output:
        output.write(file.getvalue())
