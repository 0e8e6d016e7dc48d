"""Criterion ``problem_loss``: the loss of a problem of ``--task synthetic`` and the reported figures."""

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics

# Hochreiter and Schmidhuber 1997, section 5.4, count a sum as right if its error is below 0.04 of its range.
RIGHT_WITHIN = 0.08


@register_criterion("problem_loss", dataclass=FairseqDataclass)
class ProblemLoss(FairseqCriterion):
    """Cross-entropy of classes in nats, or squared error of numbers, per answer.

    The loss is over every answer, ``accuracy`` (in percent) over those that count: for copying, the ten
    recalled symbols. For numbers, ``mse`` is logged, and ``accuracy`` is the percentage with an absolute
    error below 0.08, which is 0.04 of the range of a sum of two numbers from [0, 1).
    """

    def __init__(self, task):
        super().__init__(task)
        problem = task.problem
        self.classes, self.counted_steps = problem.classes, None
        if problem.counted is not None:
            self.counted_steps = int(problem.counted.sum())
            self.register_buffer("counted", torch.from_numpy(problem.counted), persistent=False)

    def forward(self, model, sample, reduce=True):
        """Returns the summed loss, the number of answers and the logged sums."""
        answers, target = model(**sample["net_input"]).float(), sample["target"]
        reduction = "sum" if reduce else "none"
        size = counted = target.numel()
        logged = {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"], "sample_size": size}
        if self.classes:
            loss = F.cross_entropy(answers.flatten(0, -2), target.flatten(), reduction=reduction)
            right = answers.argmax(dim=-1) == target
            if self.counted_steps is not None:
                # fairseq-validate, and training by several workers, do not move a criterion to the device.
                self.counted = self.counted.to(right.device)
                right = right & self.counted
                counted = len(target) * self.counted_steps
        else:
            error = answers.squeeze(-1) - target.float()
            loss = error.square().sum() if reduce else error.square()
            right = error.abs() < RIGHT_WITHIN
            logged["squared"] = error.detach().square().sum()
        logged |= {"loss": loss.detach(), "correct": right.sum(), "counted": counted}
        return loss, size, logged

    @staticmethod
    def reduce_metrics(logging_outputs):
        def total(key):
            return utils.item(sum(log.get(key, 0) for log in logging_outputs))

        size, counted = total("sample_size"), total("counted")
        if not size:
            return
        metrics.log_scalar("loss", total("loss") / size, size, round=5)
        metrics.log_scalar("accuracy", 100.0 * total("correct") / counted, counted, round=2)
        if any("squared" in log for log in logging_outputs):
            metrics.log_scalar("mse", total("squared") / size, size, round=5)

    @staticmethod
    def logging_outputs_can_be_summed():
        return True
