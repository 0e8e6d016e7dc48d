"""Dynamic evaluation: a model keeps learning from the text that it has been scored on.

Krause, Kahembwe, Murray and Renals 2018, "Dynamic evaluation of neural sequence models", with their RMS
update rule and its RMS-scaled decay. Each chunk is scored before the model learns from it, so every symbol is
predicted from the symbols before it alone.

With w the weights, w_0 those of the checkpoint, g the gradient of the mean loss of a chunk, and G the root
mean square of the gradient over training batches:

    w <- w - lr g / (G + epsilon) + min(decay G / mean(G), 1) (w_0 - w)
"""

import logging
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rhhn_fairseq.data.text.vocabulary import PAD, UNK
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.carry import Carry

logger = logging.getLogger(__name__)

EPSILON = 2e-5
"""What the authors' program adds to the root mean square of a mean gradient."""


class DynamicEvaluation:
    """Moves the weights of a language model along the gradient of each chunk of text.

    Args:
        model: a ``CharLM`` in float32. Its parameters are changed in place.
        lr: rate of a step. decay: rate of the decay towards the checkpoint's weights.
        batches: samples of the training text, in order, from which G is measured.

    Raises:
        UsageError: the model is not in float32.
    """

    def __init__(self, model: nn.Module, lr: float, decay: float, batches: Iterable[dict]):
        self.model = model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        types = {parameter.dtype for parameter in self.parameters}
        if types != {torch.float32}:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
            raise UsageError(f"--dynamic-eval trains in float32, and the model is in {names}")
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        roots = self._root_mean_squares(batches)
        mean = float(sum(root.double().sum() for root in roots)) / sum(root.numel() for root in roots)
        self.scale = [lr / (root + EPSILON) for root in roots]
        self.decay = [(decay / mean * root).clamp(max=1.0) for root in roots]

    def learn(self, sample: dict) -> None:
        """Takes one step on a scored batch; its carry ends after the chunk, as after scoring."""
        carry = sample["net_input"]["carry"].open(sample["chunk"])
        gradients = self._gradients(sample, carry)
        terms = zip(self.parameters, gradients, self.start, self.scale, self.decay, strict=True)
        with torch.no_grad():
            for w, g, w_0, scale, decay in terms:
                w.lerp_(w_0, decay).addcmul_(scale, g, value=-1)

    def _gradients(self, sample: dict, carry: Carry) -> tuple[Tensor, ...]:
        """Returns the gradients of the mean loss of a batch, in nats per scored symbol."""
        device = self.parameters[0].device
        tokens, mask, target = (
            None if tensor is None else tensor.to(device)
            for tensor in (sample["net_input"]["src_tokens"], sample["net_input"]["mask"], sample["target"])
        )
        target = target.masked_fill(target == UNK, PAD).flatten()
        with torch.enable_grad():
            logits, _ = self.model(tokens, mask, carry=carry)
            total = F.cross_entropy(logits.flatten(0, 1).float(), target, ignore_index=PAD, reduction="sum")
            loss = total / max(sample["ntokens"], 1)
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return tuple(
            torch.zeros_like(w) if g is None else g for g, w in zip(gradients, self.parameters, strict=True)
        )

    def _root_mean_squares(self, batches: Iterable[dict]) -> list[Tensor]:
        sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        carry, n = Carry(), 0
        for sample in batches:
            for total, g in zip(sums, self._gradients(sample, carry.open(sample["chunk"])), strict=True):
                total.addcmul_(g, g)
            n += 1
        logger.info("dynamic evaluation: squares of gradients from %d training batches", n)
        return [(total / n).sqrt() for total in sums]
