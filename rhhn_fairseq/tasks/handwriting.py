"""Task ``handwriting``: predicting the next point of a pen, with a text to write or without."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II, MISSING

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.compat.configuration import typed_config
from rhhn_fairseq.data.strokes.manifest import StrokeManifest
from rhhn_fairseq.data.strokes.store import StrokeSplit
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.carry import pass_seed
from rhhn_fairseq.tasks.dynamics import DynamicsTaskConfig, LogsDynamics
from rhhn_fairseq.tasks.stroke_batches import StrokeDataset

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
