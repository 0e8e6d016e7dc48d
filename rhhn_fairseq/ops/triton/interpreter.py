"""Fixes a bug of Triton's interpreter, in versions up to 3.6.

It truncates float32 to bfloat16, where a GPU rounds.
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
    cast = builder.cast_impl

    def cast_impl(self, source, to):
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    builder.cast_impl = cast_impl
