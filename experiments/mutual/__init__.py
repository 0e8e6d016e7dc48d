"""Two trainings that learn from each other's predictions (deep mutual learning, Zhang et al. 2018).

A folder for ``--user-dir`` with the criterion ``mutual``. Both trainings run on one machine with the same
``--seed``, and so read the same batches; MUTUAL_RANK, 0 or 1, changes their initialisation and dropout. At
every update each waits for the other's probabilities, which pass through shared memory in bfloat16. Two
trainings that are resumed must be at the same update::

    rm -f /dev/shm/mutual_[01]
    MUTUAL_RANK=0 fairseq-train DATA --user-dir experiments/mutual --criterion mutual ... --save-dir first &
    MUTUAL_RANK=1 fairseq-train DATA --user-dir experiments/mutual --criterion mutual ... --save-dir second
"""

import mmap
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    label_smoothed_nll_loss,
)
from fairseq.dataclass import FairseqDataclass
from omegaconf import II
from torch import Tensor

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)

RANK = int(os.environ.get("MUTUAL_RANK", "0"))
SHARED = Path("/dev/shm")
HEADER, LARGEST = 4096, 3000 * 8192
"""Bytes before the probabilities in a file, and the most probabilities of a batch."""
PATIENCE = 1200.0
"""Seconds to wait for the other training."""


class OwnSeed(utils.set_torch_seed):
    """fairseq's seed of initialisation and dropout, another one for each rank."""

    def __init__(self, seed: int):
        super().__init__(seed + 100_003 * RANK)


utils.set_torch_seed = OwnSeed


class Exchange:
    """Memory that two trainings share: of each the number of its update, and its last two batches.

    Args:
        rank: 0 or 1. folder: of the two files.
    """

    def __init__(self, rank: int, folder: Path):
        self.mine, self.other = (_open(folder / f"mutual_{each}") for each in (rank, 1 - rank))
        self.mine[0][:] = 0
        self.update = 0

    def swap(self, probabilities: Tensor, batch: int) -> Tensor:
        """Gives the probabilities [N, V] of a batch to the other training; returns the other's.

        Raises:
            RuntimeError: the other training reads another batch, or does not come to this update.
        """
        self.update += 1
        slot, size = self.update % 2, probabilities.numel()
        (mine, values), (other, others) = self.mine, self.other
        values[slot, :size] = probabilities.flatten()
        mine[1 + slot] = batch
        mine[0] = self.update
        started = time.monotonic()
        while other[0] < self.update:
            if time.monotonic() - started > PATIENCE:
                raise RuntimeError(f"mutual: the other training has not come to update {self.update}")
            time.sleep(0.001)
        if other[1 + slot] != batch:
            raise RuntimeError("mutual: the other training reads another batch; give both one seed and data")
        return others[slot, :size].view(probabilities.shape).to(probabilities)


def _open(path: Path) -> tuple[np.ndarray, Tensor]:
    """Returns the numbers [3] and the probabilities [2, LARGEST] of a file, which it may create."""
    with open(path, "ab") as file:
        file.truncate(HEADER + 2 * 2 * LARGEST)
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    values = torch.frombuffer(memory, dtype=torch.bfloat16, offset=HEADER).view(2, LARGEST)
    return np.frombuffer(memory, np.int64, 3), values


@dataclass
class MutualConfig(FairseqDataclass):
    """Options of the criterion."""

    label_smoothing: float = field(default=0.0, metadata={"help": "epsilon of label smoothing"})
    peer_weight: float = field(default=0.5, metadata={"help": "share of the other training's predictions"})
    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("mutual", dataclass=MutualConfig)
class Mutual(LabelSmoothedCrossEntropyCriterion):
    """(1 - w) times the label-smoothed cross-entropy, and w times that against the other's probabilities."""

    def __init__(self, task, sentence_avg, label_smoothing, peer_weight):
        super().__init__(task, sentence_avg, label_smoothing)
        self.weight, self.exchange = peer_weight, None

    def compute_loss(self, model, net_output, sample, reduce=True):
        if not torch.is_grad_enabled():
            return super().compute_loss(model, net_output, sample, reduce)
        self.exchange = self.exchange or Exchange(RANK, SHARED)
        log_p, target = self.get_lprobs_and_target(model, net_output, sample)
        real = target.ne(self.padding_idx)
        log_p, target = log_p[real], target[real]
        loss, nll = label_smoothed_nll_loss(log_p, target, self.eps)
        others = self.exchange.swap(log_p.detach().exp(), int(target.sum()) * 100_003 + len(target))
        return (1 - self.weight) * loss - self.weight * (others * log_p).sum(), nll
