"""What the environment asks of the operations: which backend, which matrix products, CUDA graphs or not."""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rhhn_fairseq.errors import UsageError

KERNEL, MATMUL, CUDA_GRAPHS = "RHHN_KERNEL", "RHHN_MATMUL", "RHHN_CUDA_GRAPHS"
GEMMS = ("native", "torch")


@dataclass(frozen=True)
class Policy:
    """The settings of a process.

    Attributes:
        kernel: name of the backend that every cell has to use (``RHHN_KERNEL``); None for the best one.
        matmul: who multiplies float32 matrices on the CPU (``RHHN_MATMUL``), one of ``GEMMS``; None for the
            faster.
        graphs: whether loops run as CUDA graphs (``RHHN_CUDA_GRAPHS=1``).
    """

    kernel: str | None = None
    matmul: str | None = None
    graphs: bool = False

    @staticmethod
    def from_environment() -> "Policy":
        """The settings that the environment holds now.

        Raises:
            UsageError: RHHN_MATMUL or RHHN_CUDA_GRAPHS holds an unknown word. Names of backends are checked
                where they are known, in ``backends.select``.
        """
        kernel, matmul, graphs = (os.environ.get(name) or None for name in (KERNEL, MATMUL, CUDA_GRAPHS))
        if matmul not in (None, *GEMMS):
            raise UsageError(f"{MATMUL}={matmul} is unknown, choose from {', '.join(GEMMS)}")
        if graphs not in (None, "0", "1"):
            raise UsageError(f"{CUDA_GRAPHS}={graphs} is unknown, choose from 0, 1")
        return Policy(kernel, matmul, graphs == "1")


@functools.cache
def current() -> Policy:
    """The settings in force. The environment is read the first time; later changes of it have no effect.

    Call it as ``policy.current()``, because ``using`` replaces it.
    """
    return Policy.from_environment()


@contextlib.contextmanager
def using(**changes) -> Iterator[Policy]:
    """Changes settings for a while, as ``using(kernel="reference")``."""
    global current
    before, changed = current, replace(current(), **changes)
    current = functools.cache(lambda: changed)
    try:
        yield changed
    finally:
        current = before
