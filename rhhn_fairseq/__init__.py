"""Recurrent networks whose weights change as they read, as a fairseq plugin and a plain PyTorch library.

Importing this package never imports fairseq. If fairseq is loaded, before or after, the plugin is
loaded too (`rhhn_fairseq.autoload`), so `--user-dir` finds everything registered. The names in `__all__`
are imported from subpackages on first use, so importing this package does not import torch either.
"""

import importlib

from rhhn_fairseq.autoload import load_plugin_with_fairseq

__version__ = "0.2.0"

HOMES = {
    "build_cell": "rhhn_fairseq.cells",
    "CELLS": "rhhn_fairseq.cells",
    "UsageError": "rhhn_fairseq.errors",
}

__all__ = ["CELLS", "UsageError", "build_cell"]


def __getattr__(name: str):
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


load_plugin_with_fairseq()
