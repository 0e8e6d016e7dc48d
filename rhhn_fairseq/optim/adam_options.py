"""Base of this package's optimizers: Adam's options, checked, and the properties that fairseq reads."""

import ast
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, List

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from omegaconf import II

from rhhn_fairseq.errors import UsageError


@dataclass
class AdamOptions(FairseqDataclass):
    adam_betas: Any = field(
        default=(0.9, 0.999),
        metadata={"help": "decay of the running mean and of the running square, each in [0, 1)"},
    )
    adam_eps: float = field(
        default=1e-8, metadata={"help": "added to the root of the running square, above 0"}
    )
    lr: List[float] = II("optimization.lr")


class TorchAdam(FairseqOptimizer):
    """Base of optimizers that wrap one of torch's; subclasses set ``name`` and ``_optimizer``.

    Raises UsageError for values outside their range.
    """

    name: str

    @property
    def optimizer_config(self) -> dict:
        """The arguments of torch's class, checked; fairseq asks for them again when it resumes."""
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
        """Adam is element-wise, and flattening keeps the norm over all parameters, so --fp16 may flatten."""
        return True

    @property
    def supports_memory_efficient_fp16(self) -> bool:
        """fairseq asks this only to run with --memory-efficient-fp16 or --memory-efficient-bf16.

        These keep no float32 weights, which torch's Adam needs, so it raises UsageError.
        """
        raise UsageError(
            f"--optimizer {self.name} updates float32 weights: replace --memory-efficient-fp16 or "
            "--memory-efficient-bf16 by --fp16 or --bf16"
        )


def _two_numbers(betas) -> tuple:
    """Returns `betas`, given as text or as a sequence, as a tuple of two numbers."""
    try:
        first, second = ast.literal_eval(betas) if isinstance(betas, str) else betas
        return float(first), float(second)
    # The last three come from numbers beyond float64 and from deeply nested text.
    except (ValueError, TypeError, SyntaxError, OverflowError, MemoryError, RecursionError) as error:
        raise UsageError(
            f"--adam-betas {betas} must be two numbers in [0, 1), for example (0.9, 0.999)"
        ) from error


def _check(option: str, value, valid: bool, what: str) -> None:
    if not valid:
        raise UsageError(f"{option} {value} must be {what}")
