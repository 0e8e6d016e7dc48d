"""Criterion ``char_cross_entropy``: bits per character, perplexity and accuracy."""

import math
from dataclasses import dataclass

import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.utils import get_perplexity
from torch import Tensor

from rhhn_fairseq.cells.config import option


@dataclass
class CharCrossEntropyConfig(FairseqDataclass):
    activation_reg: float = option(
        0.0, help="penalty on the mean square of the last layer's outputs (Merity et al. 2018)"
    )
    temporal_activation_reg: float = option(
        0.0, help="penalty on the mean square of their change from step to step (Merity et al. 2018)"
    )


@register_criterion("char_cross_entropy", dataclass=CharCrossEntropyConfig)
class CharCrossEntropy(FairseqCriterion):
    """Sum of the negative log-probabilities of the targets, in nats.

    Targets that are padding or unknown symbols are not scored; the unknown ones are counted. Like fairseq's
    criterions, it logs ``loss`` in bits (base 2) per scored symbol, which is ``bpc``; ``ppl`` per symbol;
    ``accuracy`` in percent.

    The penalties of ``activation_penalty`` are added in training, and logged as ``penalty`` in nats per
    symbol; ``loss`` does not include them.
    """

    def __init__(self, task, activation_reg=0.0, temporal_activation_reg=0.0):
        super().__init__(task)
        self.activation_reg, self.temporal_activation_reg = activation_reg, temporal_activation_reg
        self.pad, self.unk = task.target_dictionary.pad(), task.target_dictionary.unk()

    def forward(self, model, sample, reduce=True):
        """Returns the summed loss, the number of scored targets and the logged sums."""
        logits, extra = model(**sample["net_input"])
        logits = logits.flatten(0, 1).float()
        target = sample["target"].flatten()
        unknown = target == self.unk
        target = target.masked_fill(unknown, self.pad)
        loss = F.cross_entropy(logits, target, ignore_index=self.pad, reduction="sum" if reduce else "none")
        correct = (logits.argmax(dim=-1) == target).sum()
        logged = {
            "loss": loss.detach(),
            "correct": correct,
            "unknown": unknown.sum(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample["ntokens"],
        }
        if model.training and (self.activation_reg or self.temporal_activation_reg):
            mask = sample["net_input"].get("mask")
            penalty = sample["ntokens"] * activation_penalty(
                extra["outputs"],
                extra["dropped_outputs"],
                self.activation_reg,
                self.temporal_activation_reg,
                None if mask is None else mask.T,
            )
            logged["penalty"] = penalty.detach()
            loss = loss + penalty
        return loss, sample["ntokens"], logged

    @staticmethod
    def reduce_metrics(logging_outputs):
        def total(key):
            return utils.item(sum(log.get(key, 0) for log in logging_outputs))

        scored = total("sample_size")
        if scored:
            bits = total("loss") / scored / math.log(2)
            metrics.log_scalar("loss", bits, scored, round=3)
            metrics.log_scalar("bpc", bits, scored, round=4)
            metrics.log_scalar("accuracy", 100.0 * total("correct") / scored, scored, round=2)
            metrics.log_derived("ppl", lambda meters: get_perplexity(meters["loss"].avg, 3))
            if any("penalty" in log for log in logging_outputs):
                metrics.log_scalar("penalty", total("penalty") / scored, scored, round=4)
        unknown = total("unknown")
        if unknown:
            metrics.log_scalar_sum("unknown", unknown, round=0)

    @staticmethod
    def logging_outputs_can_be_summed():
        return True


def activation_penalty(
    outputs_TBH: Tensor, dropped_TBH: Tensor, size: float, change: float, mask_TB: Tensor | None = None
) -> Tensor:
    """Returns the activation regularisation of a layer's outputs (Merity et al. 2018, section 4.6).

    Args:
        dropped_TBH: the outputs after dropout. size: factor of their mean square, the paper's alpha.
        change: factor of the mean square of the outputs' change from one step to the next, its beta.
        mask_TB: true at real positions, to which the means are limited; None if all are.
    """
    penalty = size * _mean_square(dropped_TBH, mask_TB)
    if change and len(outputs_TBH) > 1:
        # Padding follows a text, so a change is real where its later step is.
        changes = outputs_TBH.float().diff(dim=0)
        penalty = penalty + change * _mean_square(changes, None if mask_TB is None else mask_TB[1:])
    return penalty


def _mean_square(values_TBH: Tensor, mask_TB: Tensor | None) -> Tensor:
    square_TB = values_TBH.float().square().mean(dim=-1)
    if mask_TB is None:
        return square_TB.mean()
    return (square_TB * mask_TB).sum() / mask_TB.sum().clamp(min=1)
