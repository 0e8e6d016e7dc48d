"""Fixes for fairseq's ``--amp``, ``--bf16`` and ``--fp16``."""

import logging

import torch

from rhhn_fairseq.compat import in_place_of, mentions

logger = logging.getLogger("rhhn_fairseq.compat")

# Key of the float32 weights in the optimizer's state.
MASTER = "master_weights"


def unscale_once() -> bool:
    """fairseq unscales gradients through one optimizer object, to clip them, and steps another that wraps it.

    The scaler tracks objects, so it takes the gradients for still scaled and divides them again. Adam cancels
    most of that, except in its eps, and in the running squares when the scale changes.
    """
    from fairseq.optim.amp_optimizer import AMPOptimizer

    if not mentions(AMPOptimizer.step, "fp32_optimizer"):
        return False

    @in_place_of(AMPOptimizer, "__init__")
    def init_with_one_object(init, self, *args, **kwargs):
        init(self, *args, **kwargs)
        unscale = self.scaler.unscale_
        self.scaler.unscale_ = lambda optimizer: unscale(self.fp32_optimizer)

    return True


def keep_master_weights() -> bool:
    """Under --bf16 and --fp16 the optimizer has float32 copies of the weights, which fairseq does not save.

    A resumed run starts from the rounded weights and loses all that is below their precision. Here the
    copies are part of the optimizer's state. Older checkpoints, which lack them, load as before.
    """
    from fairseq.optim.fp16_optimizer import FP16Optimizer

    @in_place_of(FP16Optimizer, "state_dict")
    def state_dict(save, self):
        return save(self) | {MASTER: [weights.data for weights in _flat_or_not(self.fp32_params)]}

    @in_place_of(FP16Optimizer, "load_state_dict")
    def load_state_dict(load, self, state_dict, optimizer_overrides=None):
        saved = state_dict.get(MASTER)
        rest = {key: value for key, value in state_dict.items() if key != MASTER}
        load(self, rest, optimizer_overrides)
        if saved is None:
            logger.info("the checkpoint has no float32 weights: training goes on from the rounded ones")
            return
        masters = _flat_or_not(self.fp32_params)
        if [weights.shape for weights in saved] != [weights.shape for weights in masters]:
            logger.warning(
                "the checkpoint's float32 weights have other sizes: training goes on from the rounded ones"
            )
            return
        for weights, exact in zip(masters, saved, strict=True):
            exact = exact.to(weights.device)
            # The model's weights in the file may have been changed, as by averaging; then they are used.
            same = exact.to(self.fp16_params[0].dtype).float() == weights.data
            weights.data.copy_(torch.where(same, exact, weights.data))

    return True


def _flat_or_not(fp32_params) -> list:
    """Returns the float32 weights as a list: one per parameter, or one per device if they are flattened."""
    return list(fp32_params.values()) if isinstance(fp32_params, dict) else list(fp32_params)
