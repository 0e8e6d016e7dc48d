"""Task ``synthetic``: problems that need a long memory (copying, adding, images read pixel by pixel).

Batches have fresh examples, or those of a fixed set in a random order or its own. They are numbered across
epochs: batch ``b`` of epoch ``e`` is number ``e * len + b``. Its content depends on the seed and these two
numbers alone, so a run resumed from a checkpoint reads what it would have read, and W workers read what one
worker reads in W batches.

Shapes: B examples in a batch, N in a set, T steps, C numbers a step.
"""

import logging
from dataclasses import dataclass
from typing import List, Optional

import numpy as np
import torch
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.compat.recipes import typed_config
from rhhn_fairseq.data.problems.generated import COPYING_INPUTS, Codes, GeneratedProblem, Problem
from rhhn_fairseq.data.problems.images import STANDARD_SPLIT, T10K_SPLIT
from rhhn_fairseq.data.problems.registry import OPTIONS, PROBLEMS, build_problem
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.carry import pass_seed
from rhhn_fairseq.tasks.detaching import DetachingTask, DetachTaskConfig
from rhhn_fairseq.tasks.dynamics import DynamicsTaskConfig, LogsDynamics
from rhhn_fairseq.tasks.own_batches import BatchDataset, CutsOwnBatches, frequency_of

logger = logging.getLogger(__name__)


# The uses of random numbers. Seeds begin with one of these, so that no two uses share any numbers.
FRESH, TRAINING_SET, ORDER, VALID_SET, TEST_SET = range(5)


@dataclass(frozen=True)
class ProblemBatch:
    """One batch.

    Attributes:
        inputs: float32 [B, T, C]. targets: as ``Problem.render`` returns them. number: within its epoch.
    """

    inputs: np.ndarray
    targets: np.ndarray
    number: int


class FreshBatches:
    """Batches of examples that were never seen before, drawn from (seed, e, b).

    Args:
        problem: draws them. B: examples in a batch. count: batches in an epoch. seed: of the draws.
    """

    def __init__(self, problem: GeneratedProblem, B: int, count: int, seed: int):
        self.problem, self.B, self.count, self.seed = problem, B, count, seed

    def __len__(self):
        return self.count

    def batch(self, i: int) -> ProblemBatch:
        """Batch ``i % len(self)`` of epoch ``i // len(self)``."""
        epoch, b = divmod(i, self.count)
        rng = np.random.default_rng([FRESH, self.seed, epoch, b])
        return ProblemBatch(*self.problem.render(self.problem.draw(rng, self.B)), b)


class StoredBatches:
    """Batches of a fixed set of examples, each once per epoch; the last batch may be smaller.

    Args:
        problem: renders them. codes: the examples. B: examples in a batch.
        seed: the order of epoch e is drawn from (seed, e); None keeps their own order.
    """

    def __init__(self, problem: Problem, codes: Codes, B: int, seed: int | None = None):
        self.problem, self.codes, self.B, self.seed = problem, codes, B, seed

    def __len__(self):
        return -(-len(self.codes[0]) // self.B)

    def batch(self, i: int) -> ProblemBatch:
        """Batch ``i % len(self)`` of epoch ``i // len(self)``."""
        epoch, b = divmod(i, len(self))
        rows = slice(b * self.B, (b + 1) * self.B)
        if self.seed is not None:
            # Ordering 50,000 examples takes a millisecond, a batch of long sequences hundreds of them.
            rng = np.random.default_rng([ORDER, self.seed, epoch])
            rows = rng.permutation(len(self.codes[0]))[rows]
        return ProblemBatch(*self.problem.render(tuple(codes[rows] for codes in self.codes)), b)


def training_set(problem: GeneratedProblem, N: int, seed: int) -> Codes:
    """Draws a fixed set of N training examples from the run's seed."""
    return problem.draw(np.random.default_rng([TRAINING_SET, seed]), N)


def evaluation_set(problem: GeneratedProblem, split: str, N: int) -> Codes:
    """Draws N examples of ``valid`` or ``test``: the same in every run, independent of its seed."""
    return problem.draw(np.random.default_rng([{"valid": VALID_SET, "test": TEST_SET}[split]]), N)


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
    epoch_updates: int = option(
        1000, help="generated problems: updates in an epoch of fresh training examples", low=1
    )
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
        if not isinstance(problem, GeneratedProblem):
            for name in ("train_examples", "valid_examples", "epoch_updates"):
                if (value := getattr(cfg, name)) != getattr(SyntheticTaskConfig, name):
                    flag = "--" + name.replace("_", "-")
                    raise UsageError(f"{flag} {value} is for generated problems, not --problem {cfg.problem}")
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
    """Returns a batch as fairseq's sample; ``ntokens`` counts the steps that are read.

    Sums to predict are float64: fairseq casts float32 to half precision, which is too coarse for a target.
    """
    B, T, _ = batch.inputs.shape
    target = torch.from_numpy(batch.targets)
    return {
        "id": torch.arange(B),
        "nsentences": B,
        "ntokens": B * T,
        "net_input": {"inputs": torch.from_numpy(batch.inputs)},
        "target": target.double() if target.is_floating_point() else target,
        "number": batch.number,
    }
