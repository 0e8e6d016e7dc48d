"""A mixture of bivariate Gaussians and a pen bit, the output of a handwriting model, in log space.

Graves 2013 (arXiv 1308.0850), section 4.1. A network outputs 6 M + 1 numbers per point, here in the order
[e, w, m, s, r] of 1, M, 2 M, 2 M, M columns, which become::

    pen = sigmoid(e),   weight = softmax(w),   mean = m,   scale = exp(s),   correlation = tanh(r)

    p(dx, dy, pen bit) = (sum_j weight_j N(dx, dy; mean_j, scale_j, correlation_j)) * Bernoulli(pen bit; pen)

Nothing is ever divided by ``1 - correlation^2``, which can round to zero. With a and b the distances from the
mean in units of the scale, the exponent of the Gaussian is -q / 2, and both factors of r are sums of positive
numbers::

    q = (a^2 + b^2 - 2 tanh(r) a b) / (1 - tanh(r)^2)
      = ((1 + exp(2 r)) (a - b)^2 + (1 + exp(-2 r)) (a + b)^2) / 4
    log(1 - tanh(r)^2) / 2 = log 2 - |r| - log(1 + exp(-2 |r|))

Departure: s and r are clamped at +-10, distances at +-a million, so that loss and gradient are finite in
float32 for every finite output. Coordinates are normalised, so a scale of exp(-10) is far below what a pen
resolves.

Shapes: M components, ``...`` any leading dimensions.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rhhn_fairseq.errors import UsageError

LOG_SCALE_LIMIT = 10.0
TWIST_LIMIT = 10.0
DISTANCE_LIMIT = 1e6
# At far higher temperatures the points are no longer numbers.
HOTTEST = 1000.0


def output_size(components: int) -> int:
    """Returns how many outputs a network needs for a mixture of that many components."""
    return 6 * components + 1


def check_sharpness(bias: float, temperature: float) -> None:
    """Raises UsageError unless ``Mixture.sharpened`` takes these values."""
    if not 0 <= bias < math.inf:
        raise UsageError(f"--bias {bias} is not a number of 0 or more")
    if not 0 < temperature <= HOTTEST:
        raise UsageError(f"--temperature {temperature} is not a number above 0 and up to {HOTTEST:g}")


class Mixture(NamedTuple):
    """The distribution of the next point.

    Attributes:
        log_weight: logarithms of the components' weights, [..., M].
        mean: of the offset (dx, dy), [..., M, 2].
        log_scale: logarithms of the standard deviations, [..., M, 2].
        twist: inverse hyperbolic tangents of the correlations, [..., M].
        pen_logit: log-odds that the pen is lifted after the point, [...].
    """

    log_weight: Tensor
    mean: Tensor
    log_scale: Tensor
    twist: Tensor
    pen_logit: Tensor

    @classmethod
    def of(cls, raw: Tensor) -> "Mixture":
        """Returns the mixture that a network's outputs [..., 6 M + 1] define; see the module's docstring."""
        M = (raw.shape[-1] - 1) // 6
        if M < 1 or raw.shape[-1] != output_size(M):
            raise ValueError(f"{raw.shape[-1]} outputs are not 6 M + 1 for any M of 1 or more")
        pen, weight, mean, scale, twist = raw.split((1, M, 2 * M, 2 * M, M), dim=-1)
        return cls(
            weight.log_softmax(dim=-1),
            mean.unflatten(-1, (M, 2)),
            scale.clamp(-LOG_SCALE_LIMIT, LOG_SCALE_LIMIT).unflatten(-1, (M, 2)),
            twist.clamp(-TWIST_LIMIT, TWIST_LIMIT),
            pen.squeeze(-1),
        )

    def log_density(self, offset: Tensor) -> Tensor:
        """Returns the natural logarithm of the density at offsets [..., 2]; [...]."""
        distance = offset.unsqueeze(-2) - self.mean
        # Clamped before the division by the scale, which could make it infinite.
        distance = distance.clamp(-DISTANCE_LIMIT, DISTANCE_LIMIT)
        a, b = (distance * torch.exp(-self.log_scale)).unbind(-1)
        r = self.twist
        q = ((1 + torch.exp(2 * r)) * (a - b).square() + (1 + torch.exp(-2 * r)) * (a + b).square()) / 4
        log_sech = math.log(2) - r.abs() - torch.log1p(torch.exp(-2 * r.abs()))
        log_norm = math.log(2 * math.pi) + self.log_scale.sum(dim=-1) + log_sech
        return torch.logsumexp(self.log_weight - log_norm - q / 2, dim=-1)

    def pen_log_prob(self, pen: Tensor) -> Tensor:
        """Returns the natural logarithm of the probability of pen bits, 0 or 1, [...]; [...]."""
        return -F.binary_cross_entropy_with_logits(self.pen_logit, pen, reduction="none")

    def sharpened(self, bias: float = 0.0, temperature: float = 1.0) -> "Mixture":
        """Returns a mixture that is more concentrated on its likeliest points.

        Args:
            bias: b of 0 or more: scales become exp(s - b), weights softmax(w (1 + b)) (Graves 2013,
                equations 61 and 62).
            temperature: t above 0: weights softmax(w / t), variances t scale^2, pen sigmoid(e / t) (Ha and
                Eck 2017, arXiv 1704.03477, equation 8).

        Raises:
            UsageError: a value is out of its range.
        """
        check_sharpness(bias, temperature)
        log_weight = (self.log_weight * ((1 + bias) / temperature)).log_softmax(dim=-1)
        log_scale = self.log_scale - bias + math.log(temperature) / 2
        return self._replace(
            log_weight=log_weight, log_scale=log_scale, pen_logit=self.pen_logit / temperature
        )

    def draw(self, noise: Tensor) -> Tensor:
        """Returns the point (dx, dy, pen bit) [..., 3] that the given random numbers select.

        Args:
            noise: [..., 4]: uniform in [0, 1) for the component, two normal for the offset, uniform for the
                pen.
        """
        choose, normal, lift = noise.split((1, 2, 1), dim=-1)
        # Rounding may leave the last sum below 1, where a draw would select no component.
        ends = self.log_weight.exp().cumsum(dim=-1)
        component = (ends < choose * ends[..., -1:]).sum(dim=-1, keepdim=True)
        mean, log_scale = (
            parameter.take_along_dim(component.unsqueeze(-1), dim=-2).squeeze(-2)
            for parameter in (self.mean, self.log_scale)
        )
        twist = self.twist.take_along_dim(component, dim=-1).squeeze(-1)
        first, second = normal.unbind(-1)
        second = torch.tanh(twist) * first + second / torch.cosh(twist)
        offset = mean + log_scale.exp() * torch.stack([first, second], dim=-1)
        pen = lift.squeeze(-1) < torch.sigmoid(self.pen_logit)
        return torch.cat([offset, pen.to(offset.dtype).unsqueeze(-1)], dim=-1)
