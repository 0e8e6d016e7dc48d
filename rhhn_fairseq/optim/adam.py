"""Adam by torch's fused kernel: ``fused_adam``, with the updates of fairseq's ``adam``, and ``adam_l1``.

fairseq fuses its ``adam`` only with apex; without that package it makes about ten passes over weights,
gradients and running means in every update. torch has a kernel for CPU and GPU that makes one.
"""

import ast
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, List

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.options import option


@dataclass
class AdamOptions(FairseqDataclass):
    adam_betas: Any = option(
        (0.9, 0.999), help="decay of the running mean and of the running square, each in [0, 1)"
    )
    adam_eps: float = option(1e-8, help="added to the root of the running square, above 0")
    weight_decay: float = option(
        0.0,
        help="fused_adam: decoupled decay (AdamW), a step takes this times the rate off a weight; adam_l1: "
        "L2 penalty, added to the gradient as in torch.optim.Adam",
    )
    lr: List[float] = II("optimization.lr")


class TorchAdam(FairseqOptimizer):
    """Base of optimizers that wrap one of torch's, which raises ValueError for values outside their range."""

    kind: type[torch.optim.Optimizer]

    def __init__(self, cfg: AdamOptions, params):
        super().__init__(cfg)
        self._optimizer = self.kind(params, fused=True, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict:
        """The arguments of torch's class."""
        rates, betas = self.cfg.lr, self.cfg.adam_betas
        return {
            "lr": rates[0] if isinstance(rates, Collection) else rates,
            "betas": tuple(map(float, ast.literal_eval(betas) if isinstance(betas, str) else betas)),
            "eps": self.cfg.adam_eps,
            "weight_decay": self.cfg.weight_decay,
        }

    @property
    def supports_flat_params(self) -> bool:
        """Adam is element-wise, and flattening keeps the norm over all parameters, so --fp16 may flatten."""
        return True


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


@register_optimizer("fused_adam", dataclass=AdamOptions)
class FusedAdam(TorchAdam):
    """Makes the updates of fairseq's ``adam`` with torch's fused kernel; they differ by rounding only."""

    kind = _AdamW


@register_optimizer("adam_l1", dataclass=AdamOptions)
class AdamL1(TorchAdam):
    """torch.optim.Adam with `clip_grad_norm` by the L1 norm over all parameters together.

    ``--optimizer adam_l1 --clip-norm 10`` is the recipe of Suarez, *Character-Level Language Modeling with
    Recurrent Highway Hypernetworks* (NIPS 2017; the repository calls ``clip_grad_norm(..., 10,
    norm_type=1)``). An L1 norm adds up every element, so it is larger than the L2 norm of fairseq's other
    optimizers by about the square root of the number of parameters: the same number clips far harder.

    Weight decay is Adam's L2 penalty, unlike that of fairseq's ``adam``, which is AdamW's. With --fp16,
    --bf16 and --amp the norm is that of the float32 gradients: fairseq's wrappers get it from this optimizer.
    """

    kind = torch.optim.Adam

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn=None) -> torch.Tensor:
        """Scales all gradients so that their L1 norm is at most `max_norm`; 0 leaves them unchanged.

        Returns the norm before clipping, which fairseq logs as gnorm, as a tensor on the
        parameters' device, without waiting for it. Raises UsageError under
        --ddp-backend fully_sharded, which combines norms over workers correctly for L2 only.
        """
        if aggregate_norm_fn is not None:
            raise UsageError(
                "--optimizer adam_l1 cannot clip with --ddp-backend fully_sharded: "
                "use --ddp-backend pytorch_ddp"
            )
        params = [param for param in self.params if param.grad is not None]
        norm = torch.nn.utils.get_total_norm([param.grad for param in params], norm_type=1.0)
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
        return norm
