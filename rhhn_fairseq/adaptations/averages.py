"""Fixes for fairseq's ``--store-ema``."""

import functools

from rhhn_fairseq.adaptations import mentions


def average_floating_point_only() -> bool:
    """fairseq averages integer buffers too, which fails with "Float can't be cast to Long".

    The symbols of a character model and the fingerprint of a translation model's pieces are such buffers.
    Here they are copied instead; fairseq has a set of names for that.
    """
    from fairseq.models.ema.ema import EMA

    init = EMA.__init__
    if mentions(EMA._step_internal, "is_floating_point"):
        return False

    @functools.wraps(init)
    def init_without_integers(self, model, config, device=None, skip_keys=None):
        integers = {key for key, value in model.state_dict().items() if not value.is_floating_point()}
        init(self, model, config, device, integers | set(skip_keys or ()))

    EMA.__init__ = init_without_integers
    return True
