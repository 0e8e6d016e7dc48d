"""Normalises offsets to mean 0 and standard deviation 1, which the networks read and predict.

A loss in nats depends on it: a density per normalised unit is std_x std_y times the density per unit of the
corpus. So losses are comparable only under the same normalisation, which is stored with data and models.
"""

from dataclasses import dataclass

import numpy as np

from rhhn_fairseq.errors import UsageError

KINDS = ("standard", "isotropic", "none")


@dataclass(frozen=True)
class Normalisation:
    """``(offset - mean) / std`` of dx and dy.

    Attributes:
        mean, std: pairs for (dx, dy), in the corpus's units. They are float32 numbers, so that a model's
            file can hold them exactly.
    """

    mean: tuple[float, float]
    std: tuple[float, float]

    def __post_init__(self):
        # Four numbers, finite, and the deviations above 0.
        numbers = np.array([*self.mean, *self.std])
        if numbers.shape != (4,) or not np.isfinite(numbers).all() or not (numbers[2:] > 0).all():
            raise UsageError(f"normalisation by mean {self.mean} and std {self.std}: std must be above 0")

    @classmethod
    def measure(cls, offsets: np.ndarray, kind: str) -> "Normalisation":
        """Measures the statistics of offsets [N, 2].

        Args:
            kind: ``standard`` takes mean and standard deviation of dx and dy each (Graves 2013),
                ``isotropic`` the root mean square of both together and no mean, so that shapes keep their
                proportions, ``none`` changes nothing.

        Raises:
            UsageError: the measured deviation of dx or dy is zero.
        """
        mean, std = np.zeros(2), np.ones(2)
        if kind == "standard":
            mean, std = offsets.mean(axis=0), offsets.std(axis=0)
        elif kind == "isotropic":
            std = np.full(2, np.sqrt(np.square(offsets).mean()))
        # Relative to the offsets' size, because rounding may leave a deviation slightly above zero.
        if kind != "none" and std.min() <= 1e-9 * np.abs(offsets).max(initial=0):
            axis = "dx" if std[0] <= std[1] else "dy"
            raise UsageError(
                f"--normalise {kind}: {axis} is the same in every step of the training lines; "
                "isotropic takes lines that move in one direction only, and none takes all"
            )
        return cls(*(tuple(map(float, values.astype(np.float32))) for values in (mean, std)))

    def apply(self, points: np.ndarray) -> np.ndarray:
        """Returns points [N, 3] with normalised offsets, float64; the first row's offset stays zero."""
        points = np.array(points, dtype=np.float64)
        points[1:, :2] = (points[1:, :2] - self.mean) / self.std
        return points

    def invert(self, points: np.ndarray) -> np.ndarray:
        """Returns points [N, 3] with offsets in the corpus's units, float64; the first row's stays zero."""
        points = np.array(points, dtype=np.float64)
        points[1:, :2] = points[1:, :2] * self.std + self.mean
        return points

    def to_bits(self) -> np.ndarray:
        """Returns the four numbers (mean, std) as int64 [4] of their float32 bits.

        Half precision would round the numbers themselves, and averaging checkpoints leaves equal integers
        of this size unchanged.
        """
        return np.array([*self.mean, *self.std], dtype=np.float32).view(np.int32).astype(np.int64)

    @classmethod
    def from_bits(cls, bits: np.ndarray) -> "Normalisation":
        """Returns the normalisation that ``to_bits`` was called on."""
        numbers = np.asarray(bits).astype(np.int32).view(np.float32).tolist()
        return cls(tuple(numbers[:2]), tuple(numbers[2:]))
