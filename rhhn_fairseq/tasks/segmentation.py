"""Draws other segmentations of a sentence into pieces: subword regularisation (Kudo 2018, section 3.2).

One of the ``nbest`` most likely segmentations x of a sentence is drawn, with probability proportional to
P(x)^alpha, where P is the probability under the unigram model of the pieces.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rhhn_fairseq.data.parallel.pieces import MODEL_NAME, load_pieces
from rhhn_fairseq.errors import UsageError

MOST_SEGMENTATIONS = 512
"""The most segmentations of a sentence that sentencepiece returns."""


class SegmentationSampler:
    """See the module's docstring.

    Args:
        data_dir: a prepared directory, with the model of its pieces.
        dictionary: fairseq's; segmentations with a piece that it lacks are not drawn.
        alpha: above 0; the smaller, the more evenly the segmentations are drawn.
        nbest: how many of the most likely ones may be drawn.

    Raises:
        UsageError: the directory has no such model, or one without probabilities.
    """

    def __init__(self, data_dir: str | Path, dictionary: Any, alpha: float, nbest: int):
        self.processor, self.alpha, self.nbest = _load_unigram(Path(data_dir)), alpha, nbest
        pieces = range(self.processor.vocab_size())
        self.log_probabilities = np.array([self.processor.get_score(piece) for piece in pieces])
        self.entries = np.array([dictionary.index(self.processor.id_to_piece(piece)) for piece in pieces])
        self.unknown = dictionary.unk()
        self.log_probabilities[self.entries == self.unknown] = -np.inf
        ordinary = self.entries >= dictionary.nspecial
        self.pieces = np.full(len(dictionary), -1)
        self.pieces[self.entries[ordinary]] = np.flatnonzero(ordinary)

    def draw(self, entries: Tensor, rng: np.random.Generator) -> Tensor:
        """Draws a segmentation of the text of some entries.

        Args:
            entries: dictionary indices [length]. Those at either end that are not pieces, such as the end of
                the sentence, are kept.

        Returns:
            new entries for the same text; ``entries`` itself if the text has a character without a piece.
        """
        pieces = self.pieces[entries.numpy()]
        inner = np.flatnonzero(pieces >= 0)
        # A space before a character without a piece is a piece of its own, which the text would lose.
        if (entries == self.unknown).any() or not inner.size or inner[-1] - inner[0] + 1 != inner.size:
            return entries
        text = self.processor.decode(pieces[inner].tolist())
        segmentations = self.processor.nbest_encode_as_ids(text, self.nbest)
        log_weights = [self.alpha * self.log_probabilities[each].sum() for each in segmentations]
        # With Gumbel noise added, each is the largest with the probability above.
        drawn = segmentations[int(np.argmax(log_weights + rng.gumbel(size=len(log_weights))))]
        new = torch.from_numpy(self.entries[drawn]).to(entries.dtype)
        return torch.cat((entries[: inner[0]], new, entries[inner[-1] + 1 :]))


def _load_unigram(data_dir: Path):
    processor = load_pieces(data_dir)
    try:
        processor.nbest_encode_as_ids("a", 2)
    except RuntimeError as error:
        raise UsageError(
            f"--subword-sampling: the pieces of {data_dir / MODEL_NAME} have no probabilities; "
            "prepare the data with --model-type unigram"
        ) from error
    return processor
