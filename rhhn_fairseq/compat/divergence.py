"""Training that diverges ends in a one-line error, whether its losses are infinite or only absurd."""

import logging
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rhhn_fairseq.compat import in_place_of, trains_ours
from rhhn_fairseq.errors import UsageError

logger = logging.getLogger("rhhn_fairseq.compat")

STARTED = time.time()
"""When this process began, within seconds."""

# No model that learns has a loss of this many times that of the uniform distribution over the vocabulary.
# A cross-entropy of x nats means that logits differ by x. Before the first update, weights with a standard
# deviation of 1, more than any initialisation uses, give logits of sqrt(H) for H units: 100 for 10,000 units,
# and a loss of at most a few hundred. The bound is 1000 ln 2 = 693 for the smallest possible vocabulary and
# 3,912 for 50 characters. After one update with --lr 1e6 the loss is above a million.
# Regression targets are of order 1: sums of two numbers below 1, and normalised pen offsets. A prediction
# that is off by a thousand has a squared error of a million, and as many nats under a density of width 1.
ABSURD = 1000.0


def end_divergence_in_one_line() -> bool:
    """A diverging run prints its whole model: fairseq dumps the norm and gradient of every parameter.

    It then ends in a FloatingPointError. Here the dump is omitted, the names of the first module
    with a NaN and of three parameters with such a gradient are logged, and the error states the
    update and what to try. With several GPUs fairseq reports the same event as "gradients are
    inconsistent"; the norms in that message identify it. If workers really disagree, fairseq's
    error is kept.
    """
    from fairseq import trainer

    class BriefNanDetector(trainer.NanDetector):
        def __init__(self, model):
            # fairseq's hooks on the backward pass are of a kind that PyTorch warns about.
            super().__init__(model, backward=False)

        def __exit__(self, *exception):
            gradients = ((name, parameter.grad) for name, parameter in self.named_parameters)
            bad = [name for name, g in gradients if g is not None and not g.isfinite().all()]
            if bad:
                more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
                logger.warning("NaN or infinite gradients: %s%s", ", ".join(bad[:3]), more)
            self.close()

    @in_place_of(trainer.Trainer, "_reduce_and_log_stats")
    def reduce_and_log_stats(reduce, self, logging_outputs, sample_size, grad_norm=None):
        figures = reduce(self, logging_outputs, sample_size, grad_norm)
        # Reading a number from a GPU synchronises, so it is done only when fairseq itself shows it.
        shown = self.get_num_updates() % self.cfg.common.log_interval == 0
        bounds = largest_losses(self.task) if trains_ours(self) else {}
        if "nll_loss" in figures:
            # With --sentence-avg, loss is a sum over a sentence. nll_loss is a mean over symbols.
            bounds.pop("loss", None)
        for name, bound in bounds.items():
            loss = figures.get(name)
            if loss is None or (torch.is_tensor(loss) and loss.is_cuda and not shown):
                continue
            if not float(loss) <= bound:
                what = f"{name} {float(loss):.4g} is above {bound:.4g}, which no model that learns exceeds"
                raise _diverged(self, self.get_num_updates(), what, _largest(self.model))
        return figures

    trainer.NanDetector = BriefNanDetector
    return True


@contextmanager
def named(trainer) -> Iterator[None]:
    """Turns fairseq's error for numbers out of range into one that names the update and the parameter."""
    try:
        yield
    except FloatingPointError as error:
        if not is_divergence(error):
            raise
        what = "the loss or a gradient became NaN or infinite"
        raise _diverged(trainer, trainer.get_num_updates() + 1, what, _largest(trainer.model)) from error


def largest_losses(task) -> dict[str, float]:
    """Returns by name the losses beyond which training has diverged; in bits if there are classes."""
    classes = getattr(getattr(task, "problem", None), "classes", None)
    if not classes:
        try:
            classes = len(task.target_dictionary)
        except (NotImplementedError, TypeError):
            return {"mse": ABSURD**2, "nats_point": ABSURD**2}
    bound = ABSURD * math.log2(max(classes, 2))
    return {"nll_loss": bound, "loss": bound}


def _diverged(trainer, update: int, what: str, parameter: str) -> UsageError:
    """Returns the error for training that has diverged; it names the dump that fairseq leaves."""
    clip = trainer.cfg.optimization.clip_norm
    dump = os.path.join(trainer.cfg.checkpoint.save_dir, "crash.pt")
    # An older one is another run's.
    is_new = os.path.exists(dump) and os.path.getmtime(dump) >= STARTED
    left = f"; fairseq left the weights before it in {dump}" if is_new else ""
    hint = f"try a lower --lr (now {trainer.get_lr():g}) or a stronger --clip-norm"
    return UsageError(
        f"training diverged in update {update}: {what} (in {parameter}); {hint} "
        f"(now {f'{clip:g}' if clip > 0 else 'off'}){left}"
    )


def _largest(model) -> str:
    """Returns the first parameter with a non-finite value or gradient, else that with the largest value."""
    sizes = {}
    for name, parameter in model.named_parameters():
        for values in (parameter.detach(), parameter.grad):
            if values is not None and not bool(values.isfinite().all()):
                return name
        sizes[name] = float(parameter.detach().abs().max())
    return max(sizes, key=sizes.get)


def is_divergence(error: FloatingPointError) -> bool:
    """Returns whether this is fairseq's error for numbers out of range, not for workers that disagree."""
    return bool(re.search(r"Nan/Inf|[Mm]inimum loss scale reached|= *[-+]?(nan|inf)\b", str(error)))
