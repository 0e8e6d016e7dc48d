"""Repairs of fairseq's ``--amp``."""

import functools

from rhhn_fairseq.adaptations import mentions


def unscale_once() -> bool:
    """fairseq has the scaler unscale gradients by one object, to clip them, and step another that wraps it.

    The scaler keeps a list by object, takes the gradients for scaled and divides them again. Adam hides
    most of that, but not its eps, nor the running squares when the scale changes.
    """
    from fairseq.optim.amp_optimizer import AMPOptimizer

    if not mentions(AMPOptimizer.step, "fp32_optimizer"):
        return False
    init = AMPOptimizer.__init__

    @functools.wraps(init)
    def init_with_one_object(self, *args, **kwargs):
        init(self, *args, **kwargs)
        unscale = self.scaler.unscale_
        self.scaler.unscale_ = lambda optimizer: unscale(self.fp32_optimizer)

    AMPOptimizer.__init__ = init_with_one_object
    return True
