"""Fixes for fairseq's ``--store-ema``."""

import logging

from rhhn_fairseq.adaptations import in_place_of, mentions

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


def begin_with_the_checkpoint() -> bool:
    """``--store-ema`` with a checkpoint that holds no average ends in "KeyError: 'model'".

    fairseq then means to begin the average with the checkpoint's weights, but has deleted them by that time.
    This happens when ``--store-ema`` is added to a run that resumes, and with ``--finetune-from-model``. Here
    the weights stand in for the missing average.
    """
    from fairseq import checkpoint_utils
    from fairseq.trainer import Trainer

    averaging = []

    @in_place_of(checkpoint_utils, "load_checkpoint_to_cpu")
    def load_checkpoint_to_cpu(load_to_cpu, path, *args, **kwargs):
        state = load_to_cpu(path, *args, **kwargs)
        if averaging and "model" in state and "ema" not in state.setdefault("extra_state", {}):
            logger.warning("%s holds no average of the weights; the average begins with its weights", path)
            state["extra_state"]["ema"] = state["model"]
        return state

    @in_place_of(Trainer, "load_checkpoint")
    def load_checkpoint(load, self, *args, **kwargs):
        if self.cfg.ema.store_ema:
            averaging.append(self)
        try:
            return load(self, *args, **kwargs)
        finally:
            averaging.clear()

    return True
