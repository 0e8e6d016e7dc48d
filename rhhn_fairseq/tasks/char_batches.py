"""fairseq datasets of the batches of ``lanes``."""

import numpy as np
import torch
from fairseq.data import FairseqDataset

from rhhn_fairseq.data.text.vocabulary import UNK
from rhhn_fairseq.tasks.lanes import PAD, Batch


class StreamDataset(FairseqDataset):
    """One split as a stream of dictionary indices; what ``task.dataset(split)`` returns.

    Args:
        stream: indices [N]. split: the split's name.
    """

    def __init__(self, stream: np.ndarray, split: str):
        self.stream, self.split = stream, split

    def __len__(self):
        return len(self.stream)

    def __getitem__(self, index):
        return int(self.stream[index])


class BatchDataset(FairseqDataset):
    """The batches of a cutter (``Lanes``, ``Windows``, ``RandomWindows``); one item is one batch."""

    def __init__(self, cutter):
        self.cutter = cutter

    def __len__(self):
        return len(self.cutter)

    def __getitem__(self, index) -> Batch:
        return self.cutter.batch(index)

    def collater(self, samples: list[Batch]) -> dict:
        """Returns the one batch as fairseq's sample; ``ntokens`` counts the targets that are scored."""
        if not samples:
            return {}
        (batch,) = samples
        scored = (batch.targets != PAD) & (batch.targets != UNK)
        mask = None if batch.mask is None else torch.from_numpy(batch.mask)
        return {
            "id": torch.arange(len(batch.inputs)),
            "nsentences": len(batch.inputs),
            "ntokens": int(scored.sum()),
            "net_input": {"src_tokens": torch.from_numpy(batch.inputs), "mask": mask},
            "target": torch.from_numpy(batch.targets),
            # Where fairseq's scorer begins: it strips padding from the end by itself.
            "start_indices": (batch.targets == PAD).argmin(axis=1).tolist(),
            "chunk": batch.chunk,
            "group": batch.group,
        }
