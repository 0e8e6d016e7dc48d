"""Every module of the package can be imported: what only one command needs, too."""

from helpers.cli import python

IMPORT_ALL = """
import importlib, pkgutil
import rhhn_fairseq

for module in pkgutil.walk_packages(rhhn_fairseq.__path__, "rhhn_fairseq."):
    # The compiled kernels are libraries that torch loads, not modules of Python.
    if not module.name.endswith("__main__") and "native._" not in module.name:
        importlib.import_module(module.name)
"""


def test_every_module_imports():
    result = python(IMPORT_ALL)
    assert result.returncode == 0, result.stderr
