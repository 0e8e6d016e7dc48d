"""Criterion ``mixture_density``: the negative log-density of pen points, in nats."""

from dataclasses import dataclass

import torch
from fairseq import utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.mixture import Mixture

AVERAGES = ("point", "sequence")


@dataclass
class MixtureDensityConfig(FairseqDataclass):
    average: str = option(
        "point",
        help="what the gradient is a mean over: every 'point', or every 'sequence' (a sum over its points, "
        "some hundred times as long, which matters to --clip-norm)",
        choices=AVERAGES,
    )


@register_criterion("mixture_density", dataclass=MixtureDensityConfig)
class MixtureDensity(FairseqCriterion):
    """Sum of the negative log-densities of the points, in nats; Graves 2013, equation 26.

    Densities are those of normalised offsets. It logs ``nats_seq``, the mean over sequences, as the papers
    report it; ``nats_point``, the mean over points, and ``pen_nats``, the pen bits' share of it; ``loss``,
    the one of the two means that ``average`` selects; and ``pen_errors`` in percent of the points.

    Raises:
        UsageError: ``average`` is neither point nor sequence.
    """

    def __init__(self, task, average):
        super().__init__(task)
        if average not in AVERAGES:
            raise UsageError(f"--average {average} is unknown, choose from {', '.join(AVERAGES)}")
        self.average = average

    def forward(self, model, sample, reduce=True):
        """Returns the loss (per point without ``reduce``), what it is divided by, and the logged sums."""
        raw, _ = model(**sample["net_input"])
        target, mask = sample["target"], sample["net_input"]["mask"]
        # Half precision is too coarse for the sums, and for the data.
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        target = target.to(raw.dtype)
        if mask is not None:
            # A NaN at padding would reach the gradient through a product with zero.
            padding = ~mask.unsqueeze(-1)
            raw, target = raw.masked_fill(padding, 0.0), target.masked_fill(padding, 0.0)
        mixture, pen = Mixture.of(raw), target[..., 2]
        pen_nats = -mixture.pen_log_prob(pen)
        nats = pen_nats - mixture.log_density(target[..., :2])
        wrong = (mixture.pen_logit > 0) != (pen > 0.5)
        if mask is not None:
            nats, pen_nats = (term.masked_fill(~mask, 0.0) for term in (nats, pen_nats))
            wrong = wrong & mask
        loss = nats.sum() if reduce else nats
        sample_size = sample["ntokens"] if self.average == "point" else sample["nsentences"]
        logged = {
            "loss": loss.detach(),
            "pen_loss": pen_nats.detach().sum(),
            "pen_wrong": wrong.sum(),
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
        }
        return loss, sample_size, logged

    @staticmethod
    def reduce_metrics(logging_outputs):
        def total(key):
            return utils.item(sum(log.get(key, 0) for log in logging_outputs))

        points, sequences, weight = total("ntokens"), total("nsentences"), total("sample_size")
        if not points:
            return
        loss = total("loss")
        metrics.log_scalar("loss", loss / weight, weight, round=4)
        metrics.log_scalar("nats_seq", loss / sequences, sequences, round=2)
        metrics.log_scalar("nats_point", loss / points, points, round=4)
        metrics.log_scalar("pen_nats", total("pen_loss") / points, points, round=4)
        metrics.log_scalar("pen_errors", 100.0 * total("pen_wrong") / points, points, round=2)

    @staticmethod
    def logging_outputs_can_be_summed():
        return True
