"""Benchmarks of speed and memory, one module for each command of ``rhhn bench``.

A command's module has ``Config`` (a dataclass of what is measured), ``SMOKE`` (sizes that run everything
within seconds), ``run(config)``, which returns a report of plain values, ``COLUMNS`` (its table) and
``draw(report)`` (its figure). They share:

- ``machine``: device, threads, forced backends, what the figures depend on;
- ``contenders``: the modules that are compared, and ``external``, those of other packages;
- ``parity``: their results against float64, before anything is timed;
- ``timing``: rounds in which every contender runs once, and medians over them;
- ``floors``: operations in the matrix products, and the least time that these take;
- ``report``: tables, JSON, pictures.
"""

import importlib
from types import ModuleType

COMMANDS = {
    "cells": "forward and backward of every cell on every backend, beside torch.nn.LSTM",
    "lm": "training steps of character language models, beside the same with torch.nn.LSTM",
    "gnmt-train": "training passes of translation models, beside fairseq's lstm",
    "gnmt-decode": "beam search of translation models, beside fairseq's lstm",
    "memory": "peak memory of a cell's forward and backward by backend",
    "products": "matrix products on the CPU by whatever can multiply, beside torch's",
    "scaling": "time per token as length, width and batch double",
}
"""What each command measures, by its name."""


def command(name: str) -> ModuleType:
    """Returns the module of a command."""
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
