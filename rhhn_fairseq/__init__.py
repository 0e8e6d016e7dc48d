"""Recurrent networks whose weights change as they read, as a fairseq plugin and a plain PyTorch library.

Importing this package never imports fairseq. The names in ``__all__`` are imported from subpackages on first
use, so importing this package does not import torch either.

The plugin is loaded as soon as both this package and fairseq are imported, in either order. fairseq's
``--user-dir`` registers components by importing the package, so it registers nothing if the package is
already imported; a notebook that imports ``rhhn_fairseq.cells`` first and fairseq later would then miss every
model. So if fairseq is loaded, the plugin is imported at once. If not, a finder on ``sys.meta_path`` waits
for the import of ``fairseq`` and imports the plugin when that module has finished executing: a partially
imported fairseq has no registries yet. For the same reason a module inside fairseq that imports this package
while fairseq itself is being imported gets only the plain library.
"""

import importlib
import logging
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader

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


PLUGIN = "rhhn_fairseq.plugin"


class FairseqFinder(MetaPathFinder):
    """Finds ``fairseq`` exactly as the other finders do, and imports the plugin after it."""

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != "fairseq":
            return None
        for finder in sys.meta_path:
            if isinstance(finder, FairseqFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if isinstance(spec.loader, SourceFileLoader):
                    self.follow(spec.loader)
                return spec
        return None

    def follow(self, loader: SourceFileLoader) -> None:
        """Makes this loader import the plugin after it has executed fairseq.

        The function shadows the loader's method only until it is called, so ``fairseq.__spec__`` and
        ``fairseq.__loader__`` are unchanged afterwards.
        """
        if "exec_module" in vars(loader):
            # ``rhhn_fairseq_autoload`` also searches, within this finder's search.
            return
        execute = loader.exec_module

        def exec_module(module):
            del loader.exec_module
            # It would warn that tensorboardX is missing, which nothing here needs.
            logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module(PLUGIN)

        loader.exec_module = exec_module


def load_plugin_with_fairseq() -> None:
    """Imports the plugin now if fairseq is loaded, otherwise as soon as it is."""
    if sys.modules.get("fairseq") is not None:
        # Another thread may still be importing fairseq; this statement waits for it.
        fairseq = importlib.import_module("fairseq")
        if not getattr(fairseq.__spec__, "_initializing", False):
            importlib.import_module(PLUGIN)
    elif not any(isinstance(finder, FairseqFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, FairseqFinder())


load_plugin_with_fairseq()
