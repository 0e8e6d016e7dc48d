"""Loads everything fairseq needs: first the adaptations, then each module that registers something.

fairseq is no longer developed, and its installed files are never edited. Instead some of its functions are
replaced when the plugin is loaded: ``PATCHES`` of `rhhn_fairseq.compat` has all of them. The functions in
``PREPARATIONS`` change what is no function: a module's names, settings of a process, warnings. Each says what
fails without it, and a test fails without it.

A new optimizer, criterion, task or model is a new file in its folder; nothing is listed here.
"""

import importlib
import pkgutil

from rhhn_fairseq.compat import (
    PATCHES,
    checkpoints,
    data,
    errors,
    install,
    logs,
    recipes,
    start,
)
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.programs import end_with_failing_output

PREPARATIONS = (
    # Before the others log anything.
    end_with_failing_output,
    logs.repair_logs,
    checkpoints.load_weights_only,
    checkpoints.configuration_is_data,
    data.restore_names,
    data.keep_lines_whole,
    errors.end_jobs_in_one_line,
    recipes.look_in_the_package,
    start.keep_memory_of_programs,
    logs.restore_root_logger,
)

_applied: set[str] = set()


def apply() -> None:
    """Adapts fairseq in this process. Calling it again changes nothing.

    Raises UsageError if fairseq is missing or too old.
    """
    errors.install_excepthook()
    if not _applied:
        errors.require_fairseq()
    for prepare in PREPARATIONS:
        if prepare.__name__ not in _applied:
            prepare()
            _applied.add(prepare.__name__)
    for place in PATCHES.keys() - _applied:
        install(place)
        _applied.add(place)


apply()
for subpackage in ("optim", "criterions", "tasks", "models"):
    package = importlib.import_module(f"{__package__}.{subpackage}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
# After the imports, because another thread may still be importing this module.
gemm.set_matmul_precision()
gemm.check_policy()
