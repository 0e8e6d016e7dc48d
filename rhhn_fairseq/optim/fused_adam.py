"""fairseq's ``adam`` in one pass over the weights, ``--optimizer fused_adam``.

fairseq fuses it only with apex; without that package it makes about ten passes over weights, gradients and
running means in every update. torch has a kernel for CPU and GPU that makes one.
"""

from dataclasses import dataclass, field

import torch
from fairseq.optim import register_optimizer

from rhhn_fairseq.optim.adam_options import AdamOptions, TorchAdam


@dataclass
class FusedAdamConfig(AdamOptions):
    weight_decay: float = field(
        default=0.0,
        metadata={"help": "decoupled decay (AdamW): a step takes this times the rate off a weight"},
    )


@register_optimizer("fused_adam", dataclass=FusedAdamConfig)
class FusedAdam(TorchAdam):
    """Makes the updates of fairseq's ``adam`` with torch's fused kernel; they differ by rounding only.

    Raises UsageError for values outside their range.
    """

    name = "fused_adam"

    def __init__(self, cfg: FusedAdamConfig, params):
        super().__init__(cfg)
        self._optimizer = _AdamW(params, fused=True, **self.optimizer_config)


class _AdamW(torch.optim.AdamW):
    """AdamW that adds epsilon where fairseq does, to the uncorrected root of the running square.

    torch first divides that root by the square root of 1 - beta_2^t, so epsilon is divided by it as well. t,
    the updates of the group, is counted here, because torch's own count is a tensor on the device.
    """

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            group["updates"] = 0

    def __setstate__(self, state):
        # The state of fairseq's ``adam``, which --bf16 lets pass, has neither of the two entries.
        for group in state["param_groups"]:
            group.setdefault("fused", True)
        super().__setstate__(state)
        for group in self.param_groups:
            if "updates" not in group:
                steps = (self.state[param]["step"] for param in group["params"] if param in self.state)
                group["updates"] = int(max(steps, default=0))

    def step(self, closure=None):
        given = [group["eps"] for group in self.param_groups]
        for group in self.param_groups:
            group["updates"] += 1
            group["eps"] /= (1.0 - group["betas"][1] ** group["updates"]) ** 0.5
        try:
            return super().step(closure)
        finally:
            for group, eps in zip(self.param_groups, given, strict=True):
                group["eps"] = eps
