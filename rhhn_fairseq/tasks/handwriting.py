"""Task ``handwriting``: predicting the next point of a pen, with a text to write or without.

Shapes: B lines, T points of the longest line minus one, U characters of the longest text.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.compat.recipes import typed_config
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.data.strokes.store import StrokeManifest, StrokeSplit
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.window import UNKNOWN
from rhhn_fairseq.tasks.carry import pass_seed
from rhhn_fairseq.tasks.dynamics import DynamicsTaskConfig, LogsDynamics

logger = logging.getLogger(__name__)


@dataclass
class HandwritingTaskConfig(DynamicsTaskConfig):
    data: str = option(MISSING, help="directory that `rhhn prepare` made")
    scale_augment: float = option(
        0.1,
        help="scale each training line by a random factor, at most this much from 1; 0: off",
        low=0,
        below=1,
    )
    scale_axes: str = option(
        "each",
        help="'each': dx and dy get separate factors; 'both': they share one",
        choices=("each", "both"),
    )
    max_points: int = option(0, help="read at most this many points of a line, 2 or more; 0: all", low=0)
    seed: int = II("common.seed")
    train_subset: str = II("dataset.train_subset")

    def check(self):
        super().check()
        if self.max_points == 1:
            raise UsageError("--max-points 1: must be 2 or more, or 0 for all")


@register_task("handwriting", dataclass=HandwritingTaskConfig)
class HandwritingTask(LogsDynamics, FairseqTask):
    """See the module's docstring.

    Attributes:
        manifest: what the data directory says about itself.
        reads_text: whether the model that was built last reads the text of a line; lines without one are then
            left out.
    """

    def __init__(self, cfg: HandwritingTaskConfig, manifest: StrokeManifest):
        super().__init__(cfg)
        self.manifest = manifest
        self.reads_text = False

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        cfg = typed_config(cfg, cls)
        cfg.check()
        manifest = StrokeManifest.load(cfg.data)
        logger.info("%s: %s, %d characters", cfg.data, manifest.variant, len(manifest.symbols))
        return cls(cfg, manifest)

    def build_model(self, cfg, from_checkpoint=False):
        model = super().build_model(cfg, from_checkpoint)
        self.reads_text = bool(model.window)
        return model

    def load_dataset(self, split, combine=False, **kwargs):
        """Opens a split; its points are read from disk as they are needed.

        Raises:
            UsageError: there is no such split, or it has no line with a text and the model reads texts.
        """
        lines = StrokeSplit(Path(self.cfg.data), split)
        keep = [index for index, text in enumerate(lines.texts) if text or not self.reads_text]
        if not keep:
            raise UsageError(
                f"the {split} split of {self.cfg.data} has no line with a text, but --window reads texts"
            )
        if len(keep) < len(lines):
            logger.info("%s: left out %d lines without a text", split, len(lines) - len(keep))
        self.datasets[split] = StrokeDataset(
            lines,
            self.manifest.normalisation,
            self.manifest.symbols or None,
            longest=self.cfg.max_points,
            shuffle=split == self.cfg.train_subset,
            keep=keep,
        )

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        # Scaling and dropout depend on the batch, not on the worker that has it, so that W workers train what
        # one worker does with --update-freq W.
        torch.manual_seed(pass_seed(self.cfg.seed, update_num, sample.get("key", 0) if sample else 0))
        if sample and self.cfg.scale_augment:
            sample = self.rescaled(sample)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def rescaled(self, sample: dict) -> dict:
        """Returns a batch with every line rescaled by a factor drawn from the global random numbers.

        A raw offset x times a factor f is, when normalised, ``f (x - m) / s + (f - 1) m / s``.
        """
        points, target = sample["net_input"]["points"], sample["target"]
        axes = 2 if self.cfg.scale_axes == "each" else 1
        draw = torch.rand(len(target), 1, axes, dtype=torch.float64)
        factor = (1 + self.cfg.scale_augment * (2 * draw - 1)).to(target)
        normalisation = self.manifest.normalisation
        mean, std = (target.new_tensor(values) for values in (normalisation.mean, normalisation.std))
        offsets = target[..., :2] * factor + (factor - 1) * (mean / std)
        target = torch.cat([offsets, target[..., 2:]], dim=-1)
        # The first input is where the pen touches, before any offset.
        points = torch.cat([points[:, :1], target[:, :-1]], dim=1)
        return sample | {"net_input": sample["net_input"] | {"points": points}, "target": target}


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
