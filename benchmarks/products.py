"""Float32 matrix products on the CPU, by every library that the kernels can use, beside torch's.

Each shape is timed with its two gradients, of the rows and of the matrix. All but the last run with the
matrix as it is, as for a whole sequence at once, and packed beforehand, as for the steps of a sequence.

Shapes: M rows, K inner width, N columns.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.machine import MOST, BenchConfig, check_names, measuring
from benchmarks.parity import checked
from benchmarks.report import ROUNDS, make_report, start
from benchmarks.timing import interleave, ratio
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.matmul import gemm

STEPS = 50
"""Number of products, one per step of a sequence, for which a matrix is packed."""

ENOUGH_FLOP, MOST_TIMES = 4e9, 100
"""A measurement repeats small products up to this many operations, but at most this many times."""


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    """What is timed; ``UsageError`` names a value that cannot work."""

    shapes: tuple = option(
        ("128x1000x4512", "32x1000x4000", "256x128x1000", "6272x1000x4512"),
        help="rows x inner width x columns of products, separated by commas",
    )

    def __post_init__(self):
        super().__post_init__()
        if torch.device(self.device).type != "cpu":
            raise UsageError(f"--device {self.device}: these products run on the CPU")
        check_names("shapes", self.shapes, self.shapes)
        for shape in self.shapes:
            sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", shape)
            if sizes is None or max(map(int, sizes.groups())) > MOST:
                raise UsageError(f"--shapes {shape}: write 128x1000x4000 for example, each at most {MOST:,}")


SMOKE = dict(shapes=("8x16x48", "3x5x7"), repeats=1)


def run(config: Config) -> dict:
    """Checks and times every product. Raises UsageError if one is wrong."""
    with measuring(config):
        calls, errors = {}, {}
        for shape in config.shapes:
            for (product, by), (call, exact) in products_of(*map(int, shape.split("x"))).items():
                calls[shape, product, by] = call
                name = f"{product} of {shape} by {by}"
                errors[shape, product, by] = checked(name, {"result": call()}, {"result": exact}, "float32")
        flop = {shape: 2 * np.prod([float(size) for size in shape.split("x")]) for shape in config.shapes}

        def measure(key):
            timer = Timer("call()", globals={"call": calls[key]}, num_threads=torch.get_num_threads())
            return timer.timeit(int(min(max(1, ENOUGH_FLOP // flop[key[0]]), MOST_TIMES))).mean

        seconds = interleave(list(calls), config.repeats, measure)
        rows = [
            {
                "shape": shape,
                "product": product,
                "by": by,
                "ms": 1e3 * float(np.median(own)),
                "GFLOP/s": flop[shape] / 1e9 / float(np.median(own)),
                "speed / torch": ratio(seconds[shape, product, "torch"], own),
                "error": errors[shape, product, by],
                ROUNDS: own.tolist(),
            }
            for (shape, product, by), own in seconds.items()
        ]
        return make_report("products", config, rows)


def products_of(M: int, K: int, N: int) -> dict[tuple[str, str], tuple[Callable[[], Tensor], Tensor]]:
    """Returns the products of a shape by name and library: a call, and its result in float64."""
    x, w, dy = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    results = {}
    for name, left, right in (("x w", x, w), ("dy w'", dy, w.t()), ("x' dy", x.t(), dy)):
        exact = left.double() @ right.double()
        for by in gemm.available():
            results[name, by] = _call(by, left, right, False), exact
        if name != "x' dy":
            for by in gemm.available():
                results[f"{name} packed", by] = _call(by, left, right, True), exact
    return results


def _call(by: str, left: Tensor, right: Tensor, packed: bool) -> Callable[[], Tensor]:
    """Returns a call that multiplies; ``packed``: the right matrix is packed now, not in the call."""
    out = left.new_empty(len(left), right.shape[1])
    if by == "native":
        panels = {"panels": native.pack_if_faster(right)} if packed else {}
        multiply = functools.partial(native.matmul, left, right, out, **panels)
    elif packed:
        transpose = right.stride(1) != 1
        weight = gemm.PackedWeight(right.t() if transpose else right, STEPS, len(left), by, transpose)
        multiply = functools.partial(weight.product, left, out)
    else:
        multiply = functools.partial(gemm.mm, left, right, out)

    def call() -> Tensor:
        multiply()
        return out

    return call


if __name__ == "__main__":
    start(__name__)
