"""Adam whose gradient clip uses the L1 norm, as Suarez (2017) trained his hypernetworks.

`--optimizer adam_l1 --clip-norm 10` is the recipe of *Character-Level Language Modeling with
Recurrent Highway Hypernetworks* (NIPS 2017; the repository calls `clip_grad_norm(..., 10,
norm_type=1)`). fairseq's other optimizers use the L2 norm only. An L1 norm adds up every element, so it is
larger by about the square root of the number of parameters: the same number clips far harder.
"""

from dataclasses import dataclass, field

import torch
from fairseq.optim import register_optimizer

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.optim.adam_options import AdamOptions, TorchAdam


@dataclass
class AdamL1Config(AdamOptions):
    weight_decay: float = field(
        default=0.0, metadata={"help": "L2 penalty, added to the gradient as in torch.optim.Adam"}
    )


@register_optimizer("adam_l1", dataclass=AdamL1Config)
class AdamL1(TorchAdam):
    """torch.optim.Adam with `clip_grad_norm` by the L1 norm over all parameters together.

    Weight decay is Adam's L2 penalty, unlike that of fairseq's `adam`, which is AdamW's. With
    --fp16, --bf16 and --amp the norm is that of the float32 gradients: fairseq's wrappers get it
    from this optimizer. Raises UsageError for values outside their range.
    """

    name = "adam_l1"

    def __init__(self, cfg: AdamL1Config, params):
        super().__init__(cfg)
        self._optimizer = torch.optim.Adam(params, fused=True, **self.optimizer_config)

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
