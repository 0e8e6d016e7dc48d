"""Fixes for fairseq's ``--store-ema``."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rhhn_fairseq.compat import in_place_of, mentions

logger = logging.getLogger("rhhn_fairseq.compat")


def average_floating_point_only() -> bool:
    """fairseq averages integer buffers too, which fails with "Float can't be cast to Long".

    The symbols of a character model and the fingerprint of a translation model's pieces are such buffers.
    Here they are copied instead; fairseq has a set of names for that. Weights in 16 bits are averaged in
    float32, as with ``--ema-fp32``; otherwise the average would hardly move.
    """
    from fairseq.models.ema.ema import EMA

    if mentions(EMA._step_internal, "is_floating_point"):
        return False

    @in_place_of(EMA, "__init__")
    def init_without_integers(init, self, model, config, device=None, skip_keys=None):
        integers = {key for key, value in model.state_dict().items() if not value.is_floating_point()}
        # In 16 bits, a step of the average is too small to change its last digit.
        config.ema_fp32 |= any(parameter.element_size() < 4 for parameter in model.parameters())
        init(self, model, config, device, integers | set(skip_keys or ()))

    return True


def count_updates_across_restarts() -> bool:
    """``--ema-update-freq N`` averages after every N-th update of a training, however often it is restarted.

    fairseq counts the updates since the last start.
    """
    from fairseq.models.ema.ema import EMA

    @in_place_of(EMA, "step")
    def step(inner, self, new_model, updates=None):
        if updates is not None and self.config.ema_update_freq > 1:
            self.update_freq_counter = (updates - 1) % self.config.ema_update_freq
        return inner(self, new_model, updates)

    return True


_averaging: list = []


@contextmanager
def begun_with_the_checkpoint(trainer) -> Iterator[None]:
    """``--store-ema`` with a checkpoint that holds no average ends in "KeyError: 'model'".

    fairseq then means to begin the average with the checkpoint's weights, but has deleted them by that time.
    This happens when ``--store-ema`` is added to a run that resumes, and with ``--finetune-from-model``.
    Within the context, ``add_average`` lets the weights stand in for the missing average.
    """
    if trainer.cfg.ema.store_ema:
        _averaging.append(trainer)
    try:
        yield
    finally:
        _averaging.clear()


def add_average(path: str, state: dict) -> None:
    """Gives a checkpoint that was read an average of its weights, see ``begun_with_the_checkpoint``."""
    if _averaging and "model" in state and "ema" not in state.setdefault("extra_state", {}):
        logger.warning("%s holds no average of the weights; the average begins with its weights", path)
        state["extra_state"]["ema"] = state["model"]
