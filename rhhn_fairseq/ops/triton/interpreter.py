"""Fixes three bugs of Triton's interpreter, in versions up to 3.6, that affect loops and bfloat16 operands.

It converts arrays of one element to Python numbers, which numpy rejects from 2.4 on (triton issue 9171). It
stores bfloat16 matrices as integers and multiplies them as if the bits were the numbers. And it truncates
float32 where a GPU rounds it to bfloat16.
"""

import os

import numpy as np
import torch


def mend() -> None:
    """Patches the interpreter of this process, if it is in use. Must be called only once."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    give_methods, multiply, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patched(tensor, *scope):
        give_methods(tensor, *scope)
        # From 3.6 on, attributes set this way are restored after each kernel.
        give = scope[0].set_attr if scope else setattr
        give(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widened(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        # The upper half of a float32.
        numbers = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def create_dot(self, a, b, *others):
        return multiply(self, widened(a), widened(b), *others)

    def cast_impl(self, source, to):
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
