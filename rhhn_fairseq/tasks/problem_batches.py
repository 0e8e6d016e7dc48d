"""fairseq datasets of a problem's examples: of splits and of batches."""

import torch
from fairseq.data import FairseqDataset

from rhhn_fairseq.data.problems.base import Codes
from rhhn_fairseq.data.problems.batches import ProblemBatch


class SplitDataset(FairseqDataset):
    """One split; what ``task.dataset(split)`` returns.

    Args:
        split: its name. codes: its examples; None where fresh ones are drawn for every batch.
    """

    def __init__(self, split: str, codes: Codes | None):
        self.split, self.codes = split, codes

    def __len__(self):
        return 0 if self.codes is None else len(self.codes[0])

    def __getitem__(self, index):
        return tuple(codes[index] for codes in self.codes)


class ProblemBatchDataset(FairseqDataset):
    """The batches of ``FreshBatches`` or ``StoredBatches``; one item is one batch."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index) -> ProblemBatch:
        return self.batches.batch(index)

    def collater(self, samples: list[ProblemBatch]) -> dict:
        """Returns the one batch as fairseq's sample; ``ntokens`` counts the steps that are read."""
        if not samples:
            return {}
        (batch,) = samples
        B, T, _ = batch.inputs.shape
        return {
            "id": torch.arange(B),
            "nsentences": B,
            "ntokens": B * T,
            "net_input": {"inputs": torch.from_numpy(batch.inputs)},
            "target": torch.from_numpy(batch.targets),
            "number": batch.number,
        }
