"""Criterion ``char_cross_entropy``: bits per character, perplexity and accuracy."""

import math

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.utils import get_perplexity


@register_criterion("char_cross_entropy", dataclass=FairseqDataclass)
class CharCrossEntropy(FairseqCriterion):
    """Sum of the negative log-probabilities of the targets, in nats.

    Targets that are padding or unknown symbols are not scored; the unknown ones are counted. Logged, as
    fairseq's criterions log: ``loss`` in bits (base 2) per scored symbol, which is ``bpc``; ``ppl`` per
    symbol; ``accuracy`` in percent.
    """

    def __init__(self, task):
        super().__init__(task)
        self.pad, self.unk = task.target_dictionary.pad(), task.target_dictionary.unk()

    def forward(self, model, sample, reduce=True):
        """The summed loss, the number of scored targets and the logged sums."""
        logits = model(**sample["net_input"])[0].flatten(0, 1).float()
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
        return loss, sample["ntokens"], logged

    @staticmethod
    def reduce_metrics(logging_outputs):
        def total(key):
            # With several workers every sum comes back as a tensor.
            number = sum(log.get(key, 0) for log in logging_outputs)
            return number.item() if torch.is_tensor(number) else number

        scored = total("sample_size")
        if scored:
            bits = total("loss") / scored / math.log(2)
            metrics.log_scalar("loss", bits, scored, round=3)
            metrics.log_scalar("bpc", bits, scored, round=4)
            metrics.log_scalar("accuracy", 100.0 * total("correct") / scored, scored, round=2)
            metrics.log_derived("ppl", lambda meters: get_perplexity(meters["loss"].avg, 3))
        unknown = total("unknown")
        if unknown:
            metrics.log_scalar_sum("unknown", unknown, round=0)

    @staticmethod
    def logging_outputs_can_be_summed():
        return True
