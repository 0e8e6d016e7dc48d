"""The attention of a translation model to source words for each word that it wrote.

Models read and write pieces of words. For the picture, the weights of a source word's pieces are added and
those of a target word's pieces averaged, so that the weights of each target word still add up to 1.

Shapes: S source pieces, T target pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORD_BEGINS = "\u2581"
# With more rows or columns, the labels are not readable.
MOST_WORDS = 60


@dataclass(frozen=True)
class Attention:
    """The attention of one translation.

    Attributes:
        source, target: the S and T pieces, including the ends of the sentences.
        weights: [S, T], each column adds up to 1.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: np.ndarray


def join_words(pieces: Sequence[str], ends: Sequence[str] = ("</s>",)) -> tuple[list[str], np.ndarray]:
    """Returns the words of sentencepiece's pieces, and the index of each piece's word, counted from 0.

    Args:
        ends: pieces that are always separate words.
    """
    words: list[str] = []
    numbers = []
    for piece in pieces:
        if not words or piece.startswith(WORD_BEGINS) or piece in ends or words[-1] in ends:
            words.append("")
        words[-1] += piece.removeprefix(WORD_BEGINS)
        numbers.append(len(words) - 1)
    return words, np.array(numbers, dtype=int)


def word_attention(attention: Attention) -> tuple[list[str], list[str], np.ndarray]:
    """Returns source words, target words, and the weights between them, which add up to 1 per target word."""
    source, of_source = join_words(attention.source)
    target, of_target = join_words(attention.target)
    by_source = np.zeros((len(source), len(of_target)))
    np.add.at(by_source, of_source, attention.weights)
    weights = np.zeros((len(source), len(target)))
    np.add.at(weights.T, of_target, by_source.T)
    return source, target, weights / np.bincount(of_target)
