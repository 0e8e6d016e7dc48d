"""Loads everything fairseq needs: first the adaptations, then each module that registers something.

A new optimizer, criterion, task or model is a new file in its folder; nothing is listed here.
"""

import importlib
import importlib.util
import pkgutil

from rhhn_fairseq.compat import applying
from rhhn_fairseq.ops.matmul import gemm

SUBPACKAGES = ("optim", "criterions", "tasks", "models")


def import_modules(package: str) -> list[str]:
    """Imports the modules of `package` and returns their full names; none if there is no such package.

    Modules whose names begin with an underscore are not imported, as in fairseq.
    """
    if importlib.util.find_spec(package) is None:
        return []
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    names = [f"{package}.{module.name}" for module in modules if not module.name.startswith("_")]
    for name in names:
        importlib.import_module(name)
    return names


applying.apply()
for subpackage in SUBPACKAGES:
    import_modules(f"{__package__}.{subpackage}")
# After the imports, because another thread may still be importing this module.
gemm.set_matmul_precision()
gemm.check_policy()
