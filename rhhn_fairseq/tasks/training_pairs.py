"""Training pairs: segmented into pieces anew in every epoch, and batches with a number of their own."""

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, LanguagePairDataset

from rhhn_fairseq.tasks.segmentation import SegmentationSampler


class SampledPairs(BaseWrapperDataset):
    """fairseq's pairs of sentences, with segmentations that ``SegmentationSampler`` draws.

    Batches are formed by the lengths of the sentences as prepared. The draws depend on the seed, the epoch
    and the pair alone, so they are the same for any number of workers and after any restart.
    """

    def __init__(
        self, pairs: LanguagePairDataset, source: SegmentationSampler, target: SegmentationSampler, seed: int
    ):
        super().__init__(pairs)
        self.samplers = {"source": source, "target": target}
        self.seed = seed
        # In shared memory, because fairseq keeps the processes that load batches for all epochs.
        self.epoch = torch.ones((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epoch.fill_(epoch)

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng([self.seed, int(self.epoch), int(index)])
        pair = self.dataset[index]
        return pair | {side: sampler.draw(pair[side], rng) for side, sampler in self.samplers.items()}


class KeyedPairs(BaseWrapperDataset):
    """Pairs whose batches have a ``key``, the smallest number of their pairs.

    No other batch of the epoch has it, and unlike the tensor ``id`` it stays on the host.
    """

    def collater(self, samples: list[dict]) -> dict:
        batch = self.dataset.collater(samples)
        return batch and batch | {"key": min(sample["id"] for sample in samples)}
