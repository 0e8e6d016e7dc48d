"""A UsageError ends a program in one line, whatever lies between it and the top of the program.

Nothing here imports fairseq at the top, so the line also appears when fairseq itself is missing.
"""

import functools
import logging
import os
import re
import sys

from rhhn_fairseq.errors import UsageError

logger = logging.getLogger("rhhn_fairseq.compat")

# How a traceback that was turned into text names the error, in front of its message.
MARK = f"{UsageError.__module__}.{UsageError.__qualname__}: "


def usage_message(error: BaseException | None) -> str | None:
    """The message of the first UsageError in the chain of causes and contexts, or None.

    fairseq wraps errors in a plain Exception, a data loader's worker and a spawned process hand
    theirs over as text with a traceback in it; the message is found in all three forms.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop(0)
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        if MARK in str(error):
            return str(error).rsplit(MARK, 1)[1].splitlines()[0]
        if isinstance(error, UsageError):
            return " ".join(str(error).split())
        waiting += [error.__cause__, error.__context__]
    return None


def wants_traceback() -> bool:
    """RHHN_TRACEBACK=1 shows the traceback as usual, for people who work on the code."""
    return os.environ.get("RHHN_TRACEBACK") == "1"


def install_excepthook() -> None:
    """Prints `error: <message>` for a UsageError; the process still ends with status 1.

    Every other exception goes to the hook that was there before.
    """
    previous = sys.excepthook
    if getattr(previous, "prints_usage_errors", False):
        return

    def excepthook(kind, error, traceback):
        message = usage_message(error) if isinstance(error, Exception) else None
        if message is None or wants_traceback():
            previous(kind, error, traceback)
        else:
            print(f"error: {message}", file=sys.stderr)

    excepthook.prints_usage_errors = True
    sys.excepthook = excepthook


def end_hydra_in_one_line() -> bool:
    """fairseq-hydra-train never reaches the excepthook: Hydra prints the error in its own way.

    Hydra catches what a job raises, and raises it again, after a line about overrides and before
    its own traceback, when the job's return value is read. At that point a UsageError becomes a
    SystemExit, which Hydra lets through and which prints the one line. (Hydra itself cannot be
    wrapped further out: it is already running when fairseq imports the user directory.)
    """
    from hydra.core.utils import JobReturn

    inner = JobReturn.return_value

    def return_value(job):
        error = job._return_value
        if isinstance(error, Exception) and not wants_traceback():
            message = usage_message(error)
            if message is not None:
                raise SystemExit(f"error: {message}")
        return inner.fget(job)

    JobReturn.return_value = property(return_value, inner.fset, inner.fdel, inner.__doc__)
    return True


def end_fp16_on_cpu_in_one_line() -> bool:
    """Training with --fp16 on a CPU ends in a traceback about CUDA: at once, or when a gradient overflows.

    fairseq's loss scaling asks for the current GPU in both places.
    """
    from fairseq.optim import FP16Optimizer

    build = FP16Optimizer.build_optimizer.__func__

    @functools.wraps(build)
    def build_on_gpu(cls, cfg, params, **kwargs):
        params = list(params)
        if getattr(cfg.common, "fp16", False) and not any(parameter.is_cuda for parameter in params):
            raise UsageError("--fp16 trains on a GPU only; on a CPU use --bf16, or neither for float32")
        return build(cls, cfg, params, **kwargs)

    FP16Optimizer.build_optimizer = classmethod(build_on_gpu)
    return True


def end_divergence_in_one_line() -> bool:
    """A diverging run prints its whole model: fairseq dumps the norm and gradient of every parameter.

    It then ends in a FloatingPointError. Here the dump is left out, the names of the first module
    with a NaN and of three parameters with such a gradient are logged, and the error says which
    update it was and what to try. With several GPUs fairseq calls the same event "gradients are
    inconsistent"; it is told apart by the norms in that message. Workers that really disagree keep
    fairseq's error.
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

    train_step = trainer.Trainer.train_step

    @functools.wraps(train_step)
    def train_step_or_one_line(self, *args, **kwargs):
        try:
            return train_step(self, *args, **kwargs)
        except FloatingPointError as error:
            if not is_divergence(error):
                raise
            clip = self.cfg.optimization.clip_norm
            raise UsageError(
                f"training diverged in update {self.get_num_updates() + 1}: the loss or a gradient "
                f"became NaN or infinite; try a lower --lr (now {self.get_lr():g}) or a stronger "
                f"--clip-norm (now {f'{clip:g}' if clip > 0 else 'off'})"
            ) from error

    trainer.NanDetector = BriefNanDetector
    trainer.Trainer.train_step = train_step_or_one_line
    return True


def is_divergence(error: FloatingPointError) -> bool:
    """Whether this is fairseq's error for numbers out of range, not for workers that disagree."""
    return bool(re.search(r"Nan/Inf|[Mm]inimum loss scale reached|= *[-+]?(nan|inf)\b", str(error)))
