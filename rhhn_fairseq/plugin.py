"""Loads everything fairseq needs: first the adaptations, then each module that registers something.

A new optimizer, criterion, task or model is a new file in its folder; nothing is listed here.
"""

import importlib
import pkgutil

from rhhn_fairseq.compat import applying
from rhhn_fairseq.ops.matmul import gemm

applying.apply()
for subpackage in ("optim", "criterions", "tasks", "models"):
    package = importlib.import_module(f"{__package__}.{subpackage}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
# After the imports, because another thread may still be importing this module.
gemm.set_matmul_precision()
gemm.check_policy()
