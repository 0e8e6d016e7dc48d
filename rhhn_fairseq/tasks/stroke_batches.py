"""Lines of handwriting as fairseq datasets and batches.

Shapes: B lines, T points of the longest line minus one, U characters of the longest text.
"""

from collections.abc import Sequence

import numpy as np
import torch
from fairseq.data import FairseqDataset

from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.data.strokes.store import StrokeSplit
from rhhn_fairseq.layers.window import UNKNOWN


class StrokeDataset(FairseqDataset):
    """A split's lines, normalised; batches have lines of similar length.

    Target i is the point after input i, so a line of N points has N - 1 of each. The first input is the point
    where the pen touches, whose offset is zero.

    Args:
        lines: an opened split. normalisation: of the offsets.
        symbols: the characters that are known; None for batches without texts.
        longest: only this many first points of a line are used; 0 for all.
        shuffle: lines of equal length come in random order.
        keep: indices of the lines to take; None for all.
    """

    def __init__(
        self,
        lines: StrokeSplit,
        normalisation: Normalisation,
        symbols: str | None = None,
        longest: int = 0,
        shuffle: bool = False,
        keep: Sequence[int] | None = None,
    ):
        self.lines, self.normalisation, self.shuffle, self.longest = lines, normalisation, shuffle, longest
        self.index_of = None if symbols is None else {symbol: i for i, symbol in enumerate(symbols)}
        self.kept = np.arange(len(lines)) if keep is None else np.asarray(keep)
        self.sizes = lines.sizes[self.kept] - 1
        if longest:
            self.sizes = np.minimum(self.sizes, longest - 1)

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> dict:
        line = int(self.kept[index])
        points = self.lines.points(line)
        if self.longest:
            points = points[: self.longest]
        item = {"id": index, "points": torch.from_numpy(self.normalisation.apply(points))}
        if self.index_of is not None:
            item["text"] = torch.tensor(
                [self.index_of.get(symbol, UNKNOWN) for symbol in self.lines.texts[line]], dtype=torch.long
            )
        return item

    def collater(self, samples: list[dict]) -> dict:
        """A batch: ``points`` and ``target`` [B, T, 3], ``mask`` [B, T] or None, and ``text`` [B, U] if read.

        Points are float64: fairseq casts float32 to half precision, which is too coarse for a target.
        """
        if not samples:
            return {}
        lengths = torch.tensor([len(sample["points"]) - 1 for sample in samples])
        points = torch.nn.utils.rnn.pad_sequence([sample["points"] for sample in samples], batch_first=True)
        mask = torch.arange(points.shape[1] - 1) < lengths.unsqueeze(1)
        net_input = {"points": points[:, :-1], "mask": None if bool(mask.all()) else mask}
        if self.index_of is not None:
            texts = [sample["text"] for sample in samples]
            net_input["text"] = torch.nn.utils.rnn.pad_sequence(
                texts, batch_first=True, padding_value=UNKNOWN
            )
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "key": min(sample["id"] for sample in samples),
            "nsentences": len(samples),
            "ntokens": int(lengths.sum()),
            "net_input": net_input,
            "target": points[:, 1:],
        }

    def num_tokens(self, index: int) -> int:
        """Returns the number of predicted points of a line, which --max-tokens counts."""
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Returns ``num_tokens`` of several lines."""
        return self.sizes[indices]

    def size(self, index: int) -> int:
        """Returns the length by which batches are formed."""
        return int(self.sizes[index])

    def ordered_indices(self) -> np.ndarray:
        """Returns the lines by length, equal ones in random order if the split is shuffled."""
        order = np.random.permutation(len(self)) if self.shuffle else np.arange(len(self))
        return order[np.argsort(self.sizes[order], kind="stable")]
