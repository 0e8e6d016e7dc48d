"""``products``: float32 matrix products on the CPU, by every library that the kernels can use.

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

from rhhn_fairseq.bench.contenders import MOST
from rhhn_fairseq.bench.machine import BenchConfig, check_distinct, measuring, now
from rhhn_fairseq.bench.parity import checked
from rhhn_fairseq.bench.report import Column, draw_bars, make_report
from rhhn_fairseq.bench.timing import interleave, ratio
from rhhn_fairseq.cells.config import option
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.matmul.gemm import available

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
            raise UsageError(f"Bench: device={self.device!r}, but these products run on the CPU")
        for shape in self.shapes:
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape):
                raise UsageError(f"Bench: shapes={shape!r} is not a shape; write 128x1000x4000 for example")
            if max(map(int, shape.split("x"))) > MOST:
                raise UsageError(f"Bench: shapes={shape!r} is too large, the largest size is {MOST}")
        check_distinct("shapes", self.shapes)


SMOKE = dict(shapes=("8x16x48", "3x5x7"), repeats=1)

COLUMNS = (
    Column("shape", "shape"),
    Column("product", "product"),
    Column("by", "by"),
    Column("ms", "ms", ".3f"),
    Column("GFLOP/s", "gflop_per_s", ",.0f"),
    Column("speed / torch", "ratio", ".2f"),
    Column("min..max", "ratio_min ratio_max", ".2f"),
    Column("error", "error", ".1e"),
)


def run(config: Config) -> dict:
    """Checks and times every product.

    Raises:
        UsageError: a product is wrong, or memory runs out.
    """
    with measuring(config):
        calls, errors = {}, {}
        for shape in config.shapes:
            for (product, by), (call, exact) in _products(*map(int, shape.split("x"))).items():
                calls[shape, product, by] = call
                name = f"{product} of {shape} by {by}"
                errors[shape, product, by] = checked(name, {"result": call()}, {"result": exact}, "float32")
        flop = {shape: 2 * np.prod([float(size) for size in shape.split("x")]) for shape in config.shapes}
        times = {shape: int(min(max(1, ENOUGH_FLOP // flop[shape]), MOST_TIMES)) for shape in config.shapes}

        def measure(key):
            start = now("cpu")
            for _ in range(times[key[0]]):
                calls[key]()
            return (now("cpu") - start) / times[key[0]]

        seconds = interleave(list(calls), config.repeats, measure)
        rows = []
        for key, own in seconds.items():
            shape, product, by = key
            rows.append(
                {
                    "shape": shape,
                    "product": product,
                    "by": by,
                    "ms": 1e3 * float(np.median(own)),
                    "gflop_per_s": flop[shape] / 1e9 / float(np.median(own)),
                    **ratio(seconds[shape, product, "torch"], own),
                    "error": errors[key],
                    "seconds": own.tolist(),
                }
            )
        return make_report("products", config, rows)


def _products(M: int, K: int, N: int) -> dict[tuple[str, str], tuple[Callable[[], Tensor], Tensor]]:
    """Returns the products of a shape by name and library: a call, and its result in float64."""
    x, w, dy = torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)
    results = {}
    for name, left, right in (("x w", x, w), ("dy w'", dy, w.t()), ("x' dy", x.t(), dy)):
        exact = left.double() @ right.double()
        for by in available():
            results[name, by] = _once(by, left, right), exact
        if name != "x' dy":
            for by in available():
                results[f"{name} packed", by] = _packed(by, left, right), exact
    return results


def _once(by: str, left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    out = left.new_empty(len(left), right.shape[1])
    if by == "native":

        def call() -> Tensor:
            native.matmul(left, right, out)
            return out

        return call
    return lambda: gemm.mm(left, right, out)


def _packed(by: str, left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    out = left.new_empty(len(left), right.shape[1])
    if by == "native":
        panels = native.pack_if_faster(right)
        multiply = functools.partial(native.matmul, left, right, out, panels=panels)
    else:
        transpose = right.stride(1) != 1
        weight = gemm.PackedWeight(right.t() if transpose else right, STEPS, len(left), by, transpose)
        multiply = functools.partial(weight.product, left, out)

    def call() -> Tensor:
        multiply()
        return out

    return call


def draw(report: dict):
    """Returns a bar chart of the speeds relative to torch's."""
    return draw_bars(report, ("shape", "product", "by"), "speed / torch")
