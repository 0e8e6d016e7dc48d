"""Operations that torch knows by name, so that it traces, exports and differentiates them as its own.

``torch.library.custom_op`` does the same, but imports torch's compiler at the first call of an operation, and
that takes longer than importing torch. Here the compiler is left alone until it is needed.
"""

import sys
from collections.abc import Callable

import torch

from rhhn_fairseq.errors import UsageError

Overload = torch._ops.OpOverload


def operation(name: str) -> Callable[[Callable], Overload]:
    """A decorator that registers a function as ``rhhn::...`` and gives the operation in its place.

    The function takes and returns new tensors, annotated as ``torch.library.infer_schema`` asks for it, and
    changes no argument. ``torch.library`` has ``register_fake`` and ``register_autograd`` for the result.

    Args:
        name: with the name space.
    """

    def register(function: Callable) -> Overload:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "default", _untraced(function))
        space, _, own = name.partition("::")
        return getattr(getattr(torch.ops, space), own).default

    return register


def refuse_gradients(operation: Overload) -> None:
    """Makes the attempt to differentiate an operation an error that says how second derivatives work."""

    def refuse(ctx, *gradients):
        raise UsageError(
            f"{operation.name()} cannot be differentiated; for second derivatives give the cell or layer "
            'backend="reference", or set RHHN_KERNEL=reference'
        )

    torch.library.register_autograd(operation, refuse)


def _untraced(function: Callable) -> Callable:
    """A function that torch's compiler, where it is loaded, does not look into."""
    disabled = None

    def call(*arguments):
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments)
            disabled = torch.compiler.disable(function)
        return disabled(*arguments)

    return call
