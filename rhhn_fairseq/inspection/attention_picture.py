"""Draws the attention of a translation as a heat map."""

from rhhn_fairseq.inspection.attention import Attention, word_attention
from rhhn_fairseq.inspection.plotting import (
    COLOUR_MAP,
    WIDTH,
    Figure,
    add_colour_bar,
    literal,
    new_figure,
    styled,
)

LONGEST = 20
"""Characters of a word that are shown."""

NARROWEST = 3.9
"""Inches of the heat map that its title takes."""


@styled()
def draw_attention(attention: Attention, title: str | None = None) -> Figure:
    """Draws the weights as a heat map: a column per source word, a row per word of the translation."""
    source, target, weights = word_attention(attention)
    source, target = ([_shortened(word) for word in words] for words in (source, target))
    # Words stand at an angle below, and to the left.
    below, left = (0.085 * max(map(len, words)) for words in (source, target))
    width = max(left + NARROWEST, min(WIDTH, 1.4 + left + 0.45 * len(source)))
    figure = new_figure(1.5 + 0.7 * below + 0.27 * len(target), width)
    axes = figure.add_subplot()
    axes.grid(False)
    image = axes.imshow(weights.T, aspect="auto", cmap=COLOUR_MAP, vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(source)), source, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(target)), target)
    axes.tick_params(length=0)
    axes.set_xlabel("source")
    axes.set_ylabel("translation")
    axes.set_title(literal(title or "Attention of each word of the translation"), loc="left", fontsize=11)
    add_colour_bar(figure, axes, image, "share of the attention", extend="neither")
    return figure


def _shortened(word: str) -> str:
    word = word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"
    return literal(word)
