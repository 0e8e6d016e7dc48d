"""Base of tasks that change the probabilities of h-detach and c-detach during training."""

from dataclasses import dataclass, fields
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.layers.detach import DetachAnnealing, DetachSchedule


@dataclass
class DetachTaskConfig(FairseqDataclass):
    """Options of a task; --h-detach and --c-detach, the initial probabilities, are options of the cell."""

    h_detach_final: Optional[float] = option(
        None, help="final probability of h-detach, reached linearly (see --detach-anneal-updates)"
    )
    c_detach_final: Optional[float] = option(None, help="final probability of c-detach (cells that have it)")
    detach_anneal_updates: Optional[int] = option(
        None, help="updates over which the probabilities move to the final ones"
    )
    detach_until: Optional[int] = option(None, help="update from which nothing is detached any more")


class DetachingTask:
    """Mixin for a task, placed before ``FairseqTask``, that changes the probabilities as its options say.

    They are logged with every update as ``h_detach`` and ``c_detach``.
    """

    annealing: Optional[DetachAnnealing] = None

    def build_model(self, cfg, from_checkpoint=False):
        """Builds the model; raises UsageError if the probabilities cannot change as a training requests."""
        model = super().build_model(cfg, from_checkpoint)
        schedule = self.detach_schedule()
        self.annealing = DetachAnnealing(model, schedule) if schedule and not from_checkpoint else None
        return model

    def detach_schedule(self) -> DetachSchedule:
        """Returns the schedule that the task's options define; raises UsageError if it is invalid."""
        return DetachSchedule(**{spec.name: getattr(self.cfg, spec.name) for spec in fields(DetachSchedule)})

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        if self.annealing is not None:
            self.annealing.set_update(update_num)
            for kind, probability in self.annealing.probabilities(update_num).items():
                metrics.log_scalar(kind, probability, weight=0, round=4)
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)
