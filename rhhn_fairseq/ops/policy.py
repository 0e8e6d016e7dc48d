"""Settings of the operations from the environment: the backend, the matrix products, and CUDA graphs."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rhhn_fairseq.errors import UsageError

KERNEL, MATMUL, CUDA_GRAPHS = "RHHN_KERNEL", "RHHN_MATMUL", "RHHN_CUDA_GRAPHS"
GEMMS = ("native", "torch")


@dataclass(frozen=True)
class Policy:
    """The settings of a process.

    Attributes:
        kernel: name of the backend that every cell has to use (``RHHN_KERNEL``); None for the best one.
        matmul: implementation of float32 products on the CPU (``RHHN_MATMUL``), one of ``GEMMS``; None for
            the faster one.
        graphs: whether loops run as CUDA graphs (``RHHN_CUDA_GRAPHS``); by default wherever there is a GPU.
    """

    kernel: str | None = None
    matmul: str | None = None
    graphs: bool = False

    @staticmethod
    def from_environment() -> "Policy":
        """Reads the settings from the environment.

        Raises:
            UsageError: RHHN_MATMUL or RHHN_CUDA_GRAPHS has an unknown value. ``backends.select`` checks the
                names of backends.
        """
        kernel, matmul, graphs = (os.environ.get(name) or None for name in (KERNEL, MATMUL, CUDA_GRAPHS))
        if matmul not in (None, *GEMMS):
            raise UsageError(f"{MATMUL}={matmul} is unknown, choose from {', '.join(GEMMS)}")
        if graphs not in (None, "0", "1"):
            raise UsageError(f"{CUDA_GRAPHS}={graphs} is unknown, choose from 0, 1")
        # A traced pass does not read it, and torch cannot trace the question.
        by_default = not torch.compiler.is_dynamo_compiling() and torch.cuda.is_available()
        return Policy(kernel, matmul, by_default if graphs is None else graphs == "1")


in_force: Policy | None = None


def current() -> Policy:
    """Returns the settings in force. The environment is read once; later changes to it have no effect."""
    # A ``functools.cache`` would make torch warn whenever a pass is compiled.
    global in_force
    if in_force is None:
        in_force = Policy.from_environment()
    return in_force


@contextlib.contextmanager
def using(**changes) -> Iterator[Policy]:
    """Changes settings inside a ``with`` block, for example ``using(kernel="reference")``.

    They are those of the process: blocks in different threads must not overlap.
    """
    global in_force
    before, changed = in_force, replace(current(), **changes)
    in_force = changed
    try:
        yield changed
    finally:
        in_force = before
