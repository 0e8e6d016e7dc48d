"""Registers operations with torch, so that it traces, exports and differentiates them like its own.

``torch.library.custom_op`` does the same, but imports torch's compiler at the first call of an operation,
which takes longer than importing torch. Here the compiler is not imported until it is needed.
"""

import functools
import sys
from collections.abc import Callable

import torch

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import policy

Overload = torch._ops.OpOverload


def operation(
    name: str, captured: Callable[[Callable], Callable] | None = None
) -> Callable[[Callable], Overload]:
    """Returns a decorator that registers a function as ``rhhn::...`` and replaces it by the operation.

    The function returns new tensors, changes no argument, and has the annotations that
    ``torch.library.infer_schema`` needs. The result works with ``register_fake`` and ``register_autograd``.

    Args:
        name: including the namespace.
        captured: makes the body that runs instead under autocast and where CUDA graphs are on, see
            ``graphs.captured``; None if the function runs in either case.
    """

    def register(function: Callable) -> Overload:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        captured_body = captured(function) if captured else function

        def call(*arguments):
            plain = not policy.current().graphs and not torch.is_autocast_enabled("cpu")
            body = function if plain and not torch.is_autocast_enabled("cuda") else captured_body
            # The compiler, if it is loaded, must not trace into the body.
            return (_untraced(body) if "torch._dynamo" in sys.modules else body)(*arguments)

        torch.library.impl(name, "default", call)
        space, _, own = name.partition("::")
        return getattr(getattr(torch.ops, space), own).default

    return register


def refuse_gradients(operation: Overload) -> None:
    """Makes differentiating an operation raise an error that says how to get second derivatives."""

    def refuse(ctx, *gradients):
        raise UsageError(
            f"{operation.name()} cannot be differentiated; for second derivatives give the cell or layer "
            'backend="reference", or set RHHN_KERNEL=reference'
        )

    torch.library.register_autograd(operation, refuse)


@functools.cache
def _untraced(body: Callable) -> Callable:
    return torch.compiler.disable(body)
