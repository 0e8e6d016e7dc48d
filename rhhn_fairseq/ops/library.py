"""Registers operations with torch, so that it traces, exports and differentiates them like its own.

``torch.library.custom_op`` does the same, but imports torch's compiler at the first call of an operation,
which takes longer than importing torch. Here the compiler is not imported until it is needed.
"""

import sys
from collections.abc import Callable

import torch

from rhhn_fairseq.errors import UsageError

Overload = torch._ops.OpOverload


def operation(name: str) -> Callable[[Callable], Overload]:
    """Returns a decorator that registers a function as ``rhhn::...`` and replaces it by the operation.

    The function returns new tensors, changes no argument, and has the annotations that
    ``torch.library.infer_schema`` needs. The result works with ``register_fake`` and ``register_autograd``.

    Args:
        name: including the namespace.
    """

    def register(function: Callable) -> Overload:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "default", _untraced(function))
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


def _untraced(function: Callable) -> Callable:
    """Wraps a function so that torch's compiler, if it is loaded, does not trace into it."""
    disabled = None

    def call(*arguments):
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments)
            disabled = torch.compiler.disable(function)
        return disabled(*arguments)

    return call
