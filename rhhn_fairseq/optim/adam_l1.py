"""Adam whose gradient clip uses the L1 norm, as Suarez (2017) trained his hypernetworks.

`--optimizer adam_l1 --clip-norm 10` is the recipe of *Character-Level Language Modeling with
Recurrent Highway Hypernetworks* (NIPS 2017; the repository calls `clip_grad_norm(..., 10,
norm_type=1)`). fairseq's other optimizers know the L2 norm only. An L1 norm adds up every element, so it is
larger by about the square root of the number of parameters: the same number clips far harder.
"""

import ast
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, List

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II

from rhhn_fairseq.errors import UsageError


@dataclass
class AdamL1Config(FairseqDataclass):
    adam_betas: Any = field(
        default=(0.9, 0.999),
        metadata={"help": "decay of the running mean and of the running square, each in [0, 1)"},
    )
    adam_eps: float = field(
        default=1e-8, metadata={"help": "added to the root of the running square, above 0"}
    )
    weight_decay: float = field(
        default=0.0, metadata={"help": "L2 penalty, added to the gradient as in torch.optim.Adam"}
    )
    lr: List[float] = II("optimization.lr")


@register_optimizer("adam_l1", dataclass=AdamL1Config)
class AdamL1(FairseqOptimizer):
    """torch.optim.Adam with `clip_grad_norm` by the L1 norm over all parameters together.

    Weight decay is Adam's L2 penalty, unlike that of fairseq's `adam`, which is AdamW's. With
    --fp16, --bf16 and --amp the norm is that of the float32 gradients: fairseq's wrappers ask this
    optimizer for it. Raises UsageError for values outside their range.
    """

    def __init__(self, cfg: AdamL1Config, params):
        super().__init__(cfg)
        self._optimizer = torch.optim.Adam(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict:
        """The arguments of torch.optim.Adam, checked; fairseq asks for them again when it resumes."""
        rates = self.cfg.lr if isinstance(self.cfg.lr, Collection) else [self.cfg.lr]
        for rate in rates:
            _check("--lr", rate, 0 <= rate < math.inf, "0 or more")
        betas = _two_numbers(self.cfg.adam_betas)
        for beta in betas:
            _check("--adam-betas", self.cfg.adam_betas, 0 <= beta < 1, "two numbers in [0, 1)")
        eps, decay = self.cfg.adam_eps, self.cfg.weight_decay
        _check("--adam-eps", eps, 0 < eps < math.inf, "above 0")
        _check("--weight-decay", decay, 0 <= decay < math.inf, "0 or more")
        return {"lr": rates[0], "betas": betas, "eps": eps, "weight_decay": decay}

    @property
    def supports_flat_params(self) -> bool:
        """Adam is point-wise and an L1 norm a plain sum, so --fp16 may flatten the parameters."""
        return True

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        """fairseq asks this only to run with --memory-efficient-fp16 or --memory-efficient-bf16.

        These keep no float32 weights, which torch.optim.Adam needs: raises UsageError.
        """
        raise UsageError(
            "--optimizer adam_l1 updates float32 weights: replace --memory-efficient-fp16 or "
            "--memory-efficient-bf16 by --fp16 or --bf16"
        )

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn=None) -> torch.Tensor:
        """Scales all gradients so that their L1 norm is at most `max_norm`; 0 leaves them alone.

        Returns the norm before clipping, which fairseq logs as gnorm, as a tensor on the
        parameters' device: nothing waits for it here. Raises UsageError under
        --ddp-backend fully_sharded, whose way to combine norms over workers is right for L2 only.
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


def _two_numbers(betas) -> tuple:
    """`betas` from a command line's text or from a sequence, as a tuple of two numbers."""
    try:
        first, second = ast.literal_eval(betas) if isinstance(betas, str) else betas
        return float(first), float(second)
    except (ValueError, TypeError, SyntaxError) as error:
        raise UsageError(
            f"--adam-betas {betas} must be two numbers in [0, 1), for example (0.9, 0.999)"
        ) from error


def _check(option: str, value, valid: bool, what: str) -> None:
    if not valid:
        raise UsageError(f"{option} {value} must be {what}")
