"""Memory allocation in fairseq's programs."""

import sys

from rhhn_fairseq.ops.memory import keep_freed_memory, limit_product_caches


def keep_memory_of_programs() -> bool:
    """Training that frees hundreds of megabytes at every update can spend a third of its time on that.

    See ``ops/memory.py``. Notebooks and other programs are not affected.
    """
    if "fairseq_cli" not in sys.modules:
        return False
    limit_product_caches()
    keep_freed_memory()
    return True
