"""Checks that contenders compute what they should: compares outputs and gradients with float64's."""

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.machine import first_calls, forced
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.matmul.gemm import matmul_precision

# Measured at hidden 1000: in float32 up to 6e-6, but 1e-3 for an IRNN over 300 steps, where rounding flips
# a few ReLUs; in bfloat16 up to 0.2 (LN HyperLSTM, 50 steps).
TOLERANCES = {"float32": 5e-3, "bfloat16": 0.5}


@dataclass(frozen=True)
class Contender:
    """A layer or a model that is checked and timed.

    Attributes:
        key: its name and what it runs on, and for a layer its type. master: its weights in float32.
        module: what is timed, in ``dtype``. forces: the backend that its cells must run on; None forces none.
    """

    key: tuple[str, ...]
    master: nn.Module
    module: nn.Module
    dtype: str = "float32"
    forces: str | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[nn.Module]:
        """Yields its module and forces its backend meanwhile."""
        with forced(self.forces, self.dtype):
            yield self.module


def with_gradients(results: dict[str, Tensor | None], module: nn.Module) -> dict[str, Tensor]:
    """Returns ``results`` and the gradients of a module's parameters by name, without missing ones."""
    results = results | {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {name: tensor for name, tensor in results.items() if tensor is not None}


def largest_error(results: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, str]:
    """Returns the largest relative error among tensors, in the Euclidean norm, and the name of that tensor.

    The norm tolerates errors of single elements, because rounding may flip a ReLU whose sum is nearly zero.
    The error is infinite if a tensor is missing or not finite.
    """
    worst = (0.0, "output")
    for name in results.keys() | exact.keys():
        error = float("inf")
        if name in results and name in exact:
            difference = (results[name].double() - exact[name]).norm()
            if difference == 0:
                continue
            error = (difference / exact[name].norm()).nan_to_num(nan=float("inf")).item()
        worst = max(worst, (error, name))
    return worst


def checked(name: str, results: dict[str, Tensor], exact: dict[str, Tensor], dtype: str) -> float:
    """Returns the error of a contender. Raises UsageError if it is too large to be rounding."""
    error, where = largest_error(results, exact)
    # Products with rounded operands are no more accurate than the type of these operands.
    exactly = matmul_precision(next(iter(results.values())).device.type) == "highest"
    tolerance = TOLERANCES[dtype if exactly else "bfloat16"]
    if error > tolerance:
        raise UsageError(
            f"{name} is wrong and will not be timed: in {dtype} the {where} differs from float64 by "
            f"{error:.1e} of its norm, more than {tolerance:g}"
        )
    return error


def check(contenders: list[Contender], collect: Callable) -> dict[Hashable, float]:
    """Returns the errors of contenders by their keys, each against float64 on the reference backend.

    What is timed in a narrow type is checked in float32 as well, which is the stricter check. In a narrow
    type a deep model may exceed the tolerance, if it errs no more than the loop over steps does in that type.

    Models are in evaluation mode, because dropout draws other masks in other types, and run without cuDNN,
    which has no backward pass in evaluation mode.

    Args:
        collect: maps a model to tensors by name.

    Raises:
        UsageError: an error is too large to be rounding.
    """
    errors, exact_of, exact = {}, None, {}
    with torch.backends.cudnn.flags(enabled=False):
        for contender in contenders:
            # Contenders that differ only in the backend share their oracle.
            if exact_of is not contender.master:
                exact_of = contender.master
                with forced("reference"):
                    exact = collect(copy.deepcopy(exact_of).eval().double())
            modules = {"float32": contender.master, contender.dtype: contender.module}
            for dtype, module in modules.items():
                module.eval()
                with forced(contender.forces):
                    for _ in range(first_calls(contender.forces)):
                        results = collect(module)
                with forced("reference"):
                    error, _ = largest_error(results, exact)
                    deep = dtype != "float32" and error > TOLERANCES[dtype]
                    if not deep or error > largest_error(collect(module), exact)[0]:
                        error = checked(" ".join(contender.key), results, exact, dtype)
                errors[contender.key] = error
                module.train().zero_grad(set_to_none=True)
    return errors
