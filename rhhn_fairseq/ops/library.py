"""Registers operations with torch, so that it traces, exports and differentiates them like its own.

``torch.library.custom_op`` does the same, but imports torch's compiler at the first call of an operation,
which takes longer than importing torch. Here the compiler is not imported until it is needed.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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


def differentiate(
    forward: Overload,
    backward: Overload,
    outputs: int,
    differentiable: int,
    keep: Callable[[Sequence, Sequence[Tensor]], tuple[Sequence, Sequence[Tensor]]],
) -> None:
    """Makes ``backward`` the backward pass of ``forward``. It cannot be differentiated itself.

    ``backward`` takes the gradients of the outputs, what ``forward`` has kept, and the arguments of
    ``forward``. It returns the gradients of all tensors among the first arguments, in their order.

    Args:
        outputs: number of outputs that have a gradient; those after them are only kept.
        differentiable: number of arguments that have one: tensors, or lists of tensors.
        keep: maps the arguments and outputs of ``forward`` to the arguments for ``backward``, where another
            tensor of the same shape and type may replace one that is not needed, and to what is kept.
    """

    def setup(ctx, inputs, output):
        arguments, kept = keep(inputs, output)
        # Of several outputs, some may not have been used.
        ctx.set_materialize_grads(outputs == 1)
        ctx.mark_non_differentiable(*(() if isinstance(output, Tensor) else output[outputs:]))
        saved, ctx.others, ctx.lengths = [], [], []
        # As ``flatten`` does, in one call.
        for argument in (kept, *arguments):
            is_list = isinstance(argument, list | tuple)
            ctx.lengths.append(len(argument) if is_list else None)
            for leaf in argument if is_list else [argument]:
                is_tensor = isinstance(leaf, Tensor)
                saved.append(leaf if is_tensor else None)
                ctx.others.append(None if is_tensor else leaf)
        ctx.save_for_backward(*saved)

    def run(ctx, *gradients):
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        leaves = [other if saved is None else saved for saved, other in pairs]
        kept, *arguments = unflatten(leaves, ctx.lengths)
        if all(gradient is None for gradient in gradients[:outputs]):
            return (*map(_no_gradient, arguments),)
        computed = backward(list(gradients[:outputs]), kept, *arguments)
        of_inputs = unflatten(computed, ctx.lengths[1 : 1 + differentiable])
        return *of_inputs, *map(_no_gradient, arguments[differentiable:])

    torch.library.register_autograd(forward, run, setup_context=setup)

    @torch.library.register_fake(backward)
    def _(gradients, kept, *arguments):
        leaves, _ = flatten(arguments[:differentiable])
        return [leaf.new_empty(leaf.shape) for leaf in leaves]

    def refuse(ctx, *gradients):
        raise UsageError(
            f"{backward.name()} cannot be differentiated; for second derivatives give the cell or layer "
            'backend="reference", or set RHHN_KERNEL=reference'
        )

    torch.library.register_autograd(backward, refuse)


def flatten(arguments: Sequence) -> tuple[list, list[int | None]]:
    """Returns the arguments, with lists replaced by their items, and the length of each; None for no list."""
    leaves: list = []
    lengths: list[int | None] = []
    for argument in arguments:
        is_list = isinstance(argument, list | tuple)
        leaves += argument if is_list else [argument]
        lengths.append(len(argument) if is_list else None)
    return leaves, lengths


def unflatten(leaves: Sequence, lengths: Sequence[int | None]) -> list:
    """Returns the arguments that ``flatten`` has taken apart."""
    rest, arguments = iter(leaves), []
    for length in lengths:
        arguments.append(next(rest) if length is None else list(itertools.islice(rest, length)))
    return arguments


def _no_gradient(argument) -> list[None] | None:
    """Returns what stands for the gradient of an argument that has none: as many as it has tensors.

    torch counts a list with a missing tensor as one argument.
    """
    is_list = isinstance(argument, list | tuple) and all(isinstance(item, Tensor) for item in argument)
    return [None] * len(argument) if is_list else None


@functools.cache
def _untraced(body: Callable) -> Callable:
    return torch.compiler.disable(body)
