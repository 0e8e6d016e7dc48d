"""Task ``synthetic``: problems that need a long memory (copying, adding, images read pixel by pixel)."""

import logging
from dataclasses import dataclass
from typing import List, Optional

import torch
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.compat.configuration import typed_config
from rhhn_fairseq.data.problems.base import Codes, GeneratedProblem, Problem
from rhhn_fairseq.data.problems.generated import COPYING_INPUTS
from rhhn_fairseq.data.problems.images import STANDARD_SPLIT, T10K_SPLIT
from rhhn_fairseq.data.problems.registry import OPTIONS, PROBLEMS, build_problem
from rhhn_fairseq.tasks.carry import pass_seed
from rhhn_fairseq.tasks.detaching import DetachingTask, DetachTaskConfig
from rhhn_fairseq.tasks.dynamics import DynamicsTaskConfig, LogsDynamics
from rhhn_fairseq.tasks.own_batches import BatchDataset, CutsOwnBatches, frequency_of
from rhhn_fairseq.tasks.problem_batches import (
    FreshBatches,
    ProblemBatch,
    StoredBatches,
    evaluation_set,
    training_set,
)

logger = logging.getLogger(__name__)


@dataclass
class SyntheticTaskConfig(DetachTaskConfig, DynamicsTaskConfig):
    problem: str = option("digits", help=f"one of {', '.join(PROBLEMS)}")
    length: Optional[int] = option(
        None,
        help="copying: the delay T, so that T + 20 steps are read (default: 100); adding: steps (100); "
        "xor: bits (30)",
    )
    copying_input: Optional[str] = option(
        None,
        help=f"copying: how a symbol is read, {' or '.join(COPYING_INPUTS)} (default: scalar, the symbol's "
        "number)",
    )
    mnist_dir: Optional[str] = option(
        None, help="mnist, pmnist: directory with the IDX files, plain or .gz (default: download)"
    )
    mnist_split: Optional[str] = option(
        None,
        help=f"mnist, pmnist: images in train/valid/test (default: {STANDARD_SPLIT}); {T10K_SPLIT} takes all "
        "of them from the file of 10,000 test images",
    )
    permutation_seed: Optional[int] = option(
        None, help="pmnist, pdigits: seed of the order of the pixels, whatever --seed is (default: 0)"
    )
    train_examples: int = option(
        0,
        help="generated problems: 0 draws fresh training examples for every update; N trains on a fixed set "
        "of N",
        low=0,
    )
    valid_examples: int = option(1000, help="generated problems: examples in valid and in test", low=1)
    epoch_updates: int = option(1000, help="updates in an epoch of fresh training examples", low=1)
    seed: int = II("common.seed")
    train_subset: str = II("dataset.train_subset")
    update_freq: List[int] = II("optimization.update_freq")


@register_task("synthetic", dataclass=SyntheticTaskConfig)
class SyntheticTask(CutsOwnBatches, LogsDynamics, DetachingTask, FairseqTask):
    """Problems that need a long memory; no data directory is needed.

    Training examples depend on the seed, the epoch and the number of the batch in it, the random numbers of a
    pass on the seed, the update and that number. So a run needs no stored state to resume where it stopped,
    and W workers train what one worker trains with --update-freq W. Validation and test examples are the same
    in every run.

    Attributes:
        problem: the problem to solve, which models and criterions read.
    """

    cfg: SyntheticTaskConfig

    def __init__(self, cfg: SyntheticTaskConfig, problem: Problem):
        super().__init__(cfg)
        self.problem = problem

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        cfg = typed_config(cfg, cls)
        cfg.check()
        problem = build_problem(cfg.problem, {option: getattr(cfg, option) for option in OPTIONS})
        logger.info("%s: %d steps of %d numbers", cfg.problem, problem.steps, problem.input_size)
        task = cls(cfg, problem)
        # Invalid options are reported before a model is built.
        task.detach_schedule()
        return task

    def load_dataset(self, split, combine=False, **kwargs):
        """Draws or takes the examples of ``train``, ``valid`` or ``test``; KeyError for another split."""
        self.datasets[split] = SplitDataset(self._codes(split))

    def _codes(self, split):
        if not isinstance(self.problem, GeneratedProblem):
            return self.problem.splits[split]
        if split != "train":
            return evaluation_set(self.problem, split, self.cfg.valid_examples)
        N = self.cfg.train_examples
        return training_set(self.problem, N, self.cfg.seed) if N else None

    @property
    def row_steps(self) -> int:
        """The number of steps in an example."""
        return self.problem.steps

    def cut_batches(self, dataset, B, workers, rank, training):
        """See ``CutsOwnBatches``."""
        seed = self.cfg.seed
        if dataset.codes is None:
            why = "batches of fresh examples are numbered through all epochs"
            count = self.cfg.epoch_updates * workers * frequency_of(self.cfg.update_freq, why)
            batches = FreshBatches(self.problem, B, count, seed)
        else:
            batches = StoredBatches(self.problem, dataset.codes, B, seed if training else None)
        return BatchDataset(batches, problem_sample), training

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        torch.manual_seed(pass_seed(self.cfg.seed, update_num, sample["number"]))
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)


class SplitDataset(FairseqDataset):
    """One split; what ``task.dataset(split)`` returns.

    Args:
        codes: its examples; None where fresh ones are drawn for every batch.
    """

    def __init__(self, codes: Codes | None):
        self.codes = codes

    def __len__(self):
        return 0 if self.codes is None else len(self.codes[0])

    def __getitem__(self, index):
        return tuple(codes[index] for codes in self.codes)


def problem_sample(batch: ProblemBatch) -> dict:
    """Returns a batch as fairseq's sample; ``ntokens`` counts the steps that are read."""
    B, T, _ = batch.inputs.shape
    return {
        "id": torch.arange(B),
        "nsentences": B,
        "ntokens": B * T,
        "net_input": {"inputs": torch.from_numpy(batch.inputs)},
        "target": torch.from_numpy(batch.targets),
        "number": batch.number,
    }
