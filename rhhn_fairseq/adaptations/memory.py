"""The memory of fairseq's programs."""

import sys

from rhhn_fairseq.allocator import keep_freed_memory


def keep_memory_of_programs() -> bool:
    """A training that gives hundreds of megabytes back at every update spends a third of its time on that.

    See ``rhhn_fairseq.allocator``. The process of a notebook or of another program is left alone.
    """
    if "fairseq_cli" not in sys.modules:
        return False
    keep_freed_memory()
    return True
