"""Checks that contenders compute what they should: compares outputs and gradients with float64's.

Shapes: T time, B batch, C input, H hidden.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rhhn_fairseq.bench.machine import DTYPES, first_calls, forced
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops.matmul.gemm import matmul_precision

ORACLE_ROWS = 32
"""Sequences the float64 run reads at a time: the whole batch would take twice the memory of what is timed."""

# Measured at hidden 1000: in float32 up to 6e-6, but 1e-3 for an IRNN over 300 steps, where rounding flips
# a few ReLUs; in bfloat16 up to 0.2 (LN HyperLSTM, 50 steps).
TOLERANCES = {"float32": 5e-3, "bfloat16": 0.5}


def draw_batch(shape: tuple[int, int, int, int], dtypes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Returns a random input [T, B, C] and output gradient [T, B, H] in float64, the same at every call.

    They are rounded to the types that are timed, so that rounding them later causes no error.

    Args:
        shape: T, B, C and H.
    """
    T, B, C, H = shape
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn((T, B, width), generator=generator) for width in (C, H)]
    for dtype in dtypes:
        drawn = [tensor.to(DTYPES[dtype]) for tensor in drawn]
    x_TBC, gradient_TBH = (tensor.double() for tensor in drawn)
    return x_TBC, gradient_TBH


def pass_results(module: nn.Module, x_TBC: Tensor, gradient_TBH: Tensor, rows: int) -> dict[str, Tensor]:
    """Returns the output and all gradients of a pass, by name, reading ``rows`` sequences at a time."""
    module.zero_grad(set_to_none=True)
    x_TBC = x_TBC.detach().requires_grad_()
    outputs = []
    for x, gradient in zip(x_TBC.split(rows, dim=1), gradient_TBH.split(rows, dim=1), strict=True):
        # h-detach draws its coins in the pass, one per step for all rows; the seed makes runs equal.
        torch.manual_seed(0)
        y, _ = module(x)
        y.backward(gradient)
        outputs.append(y.detach())
    results = {"output": torch.cat(outputs, dim=1), "gradient of input": x_TBC.grad}
    return with_gradients(results, module)


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
    """Returns the error of a contender.

    Raises:
        UsageError: it is too large to be rounding.
    """
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


def check_models(
    models: dict[str, tuple[nn.Module, str | None]], collect: Callable, dtype: str = "float32"
) -> dict[str, float]:
    """Returns the errors of whole models, each against its own float64 run on the reference backend.

    Models that are timed in another type are checked in float32 as well, which is the stricter check. In a
    narrow type a deep model may exceed the tolerance, if it errs no more than the loop over steps does in
    that type.

    Models are in evaluation mode, because dropout draws other masks in other types, and run without cuDNN,
    which has no backward pass in evaluation mode.

    Args:
        models: by name, in float32, with the backend that is forced.
        collect: maps a model to tensors by name. dtype: the type whose errors are returned.

    Raises:
        UsageError: an error is too large to be rounding.
    """
    errors, exact = {}, (None, {})
    with torch.backends.cudnn.flags(enabled=False):
        for name, (model, backend) in models.items():
            model.eval()
            # Models that differ only in the backend share their oracle.
            if exact[0] is not model:
                with forced("reference"):
                    exact = model, collect(copy.deepcopy(model).double())
            with forced(backend):
                for kind in dict.fromkeys(["float32", dtype]):
                    rounded = model if kind == "float32" else copy.deepcopy(model).to(DTYPES[kind])
                    for _ in range(first_calls(backend)):
                        results = collect(rounded)
                    error, _ = largest_error(results, exact[1])
                    if kind == "float32" or not _errs_like_the_loop(error, rounded, collect, exact[1]):
                        error = checked(name, results, exact[1], kind)
                    errors[name] = error
    return errors


def _errs_like_the_loop(error: float, model: nn.Module, collect: Callable, exact: dict[str, Tensor]) -> bool:
    """Whether an error beyond a narrow type's tolerance is no larger than that of the reference backend."""
    if error <= TOLERANCES["bfloat16"]:
        return False
    with forced("reference"):
        return error <= largest_error(collect(model), exact)[0]
