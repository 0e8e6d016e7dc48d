"""Criterion ``chunked_cross_entropy``: fairseq's label-smoothed cross-entropy in a fraction of its memory."""

from dataclasses import dataclass

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.layers.output_loss import linear_cross_entropy


@dataclass
class ChunkedCrossEntropyConfig(LabelSmoothedCrossEntropyCriterionConfig):
    output_chunk: int = option(512, help="target positions whose logits are in memory at a time")


@register_criterion("chunked_cross_entropy", dataclass=ChunkedCrossEntropyConfig)
class ChunkedCrossEntropy(LabelSmoothedCrossEntropyCriterion):
    """Options, loss and log of ``label_smoothed_cross_entropy``; see ``layers/output_loss.py``.

    For models whose decoder gives its features and has an ``output`` with ``factors``, such as ``gnmt``.
    """

    def __init__(
        self,
        task,
        sentence_avg,
        label_smoothing,
        output_chunk=512,
        ignore_prefix_size=0,
        report_accuracy=False,
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.chunk = output_chunk

    def forward(self, model, sample, reduce=True):
        """Returns the summed loss, the sample size and the logged sums; see fairseq's criterion."""
        features, _ = model(**sample["net_input"], features_only=True)
        target = sample["target"]
        if self.ignore_prefix_size:
            features, target = features[:, self.ignore_prefix_size :], target[:, self.ignore_prefix_size :]
        # With several workers the model is a proxy, which passes attributes on.
        y, weight, bias = model.decoder.output.factors(features)
        y, target = y.flatten(0, 1), target.flatten()
        real = target != self.padding_idx
        if not y.is_cuda:
            # On a GPU selecting rows would wait for the device, so there the padding is computed as well.
            y, target, real = y[real], target[real], real[real]
        loss, nll, correct = linear_cross_entropy(y, weight, bias, target, real, self.eps, self.chunk)
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logged = {
            "loss": loss.detach(),
            "nll_loss": nll,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            logged |= {"n_correct": correct, "total": real.sum()}
        return loss, sample_size, logged
