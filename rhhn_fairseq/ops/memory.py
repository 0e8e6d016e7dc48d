"""Memory of a process that computes on the CPU: freed memory is kept, and in huge pages.

The C library returns large blocks to the system as soon as they are freed and requests new ones at the next
update. Each of their pages causes a page fault and is filled with zeros: an LSTM of 128 units over 100
sequences of 320 steps takes 50,000 pages per update, a third of its time. Kept blocks are reused as they are,
and pages of 2 MB in place of 4 KB cause fewer page faults at first and fewer TLB misses later.
"""

import ctypes
import logging
import os
import resource
import sys
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

VARIABLE = "RHHN_KEEP_MEMORY"
LARGE_PAGE = 2 << 20

# From malloc.h and sys/mman.h of Linux.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
MADV_HUGEPAGE = 14

PRODUCT_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "64"}
"""Products of different shapes that oneDNN, and torch above it, keep compiled; 1,024 each by default."""

_kept = False


def keeps_freed_memory() -> bool:
    """Returns whether ``keep_freed_memory`` is in effect in this process."""
    return _kept


def keep_freed_memory() -> None:
    """Makes the process keep freed memory if RHHN_KEEP_MEMORY is 1, or if it is unset and there is no GPU.

    All later blocks then come from one region that grows and never shrinks, in huge pages if the system has
    them. The region is reserved at half of the machine's memory, which costs nothing until it is used; if
    a limit or the system counts reserved addresses, nothing is reserved. The process keeps its peak memory
    until it ends, and fragmentation raises that peak. The call has no effect if the allocator is not glibc's
    own (other systems, ``LD_PRELOAD``), or if the environment configures it (``GLIBC_TUNABLES``,
    ``MALLOC_*_``). It is logged; a second call changes nothing.
    """
    global _kept
    wanted = os.environ.get(VARIABLE) or ("0" if torch.cuda.is_available() else "1")
    if _kept or wanted != "1" or _has_other_allocator() or not sys.platform.startswith("linux"):
        return
    c = ctypes.CDLL(None)
    if not hasattr(c, "gnu_get_libc_version") or not hasattr(c, "mallopt"):
        return
    # Only separately mapped blocks are returned at once; without them, all blocks come from the region.
    c.mallopt(M_MMAP_MAX, 0)
    c.mallopt(M_TRIM_THRESHOLD, -1)
    _reserve(c, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    _kept = True
    logger.info("this process keeps freed memory for the next update (%s=0 gives it back)", VARIABLE)


def limit_product_caches() -> None:
    """Limits how many compiled products are kept, unless the environment says how many.

    oneDNN compiles a product of bfloat16 operands, or one in medium precision, for every shape. Each takes up
    to half a megabyte and stays between the blocks of the updates. Where lengths vary, as in translation, the
    process would grow for thousands of updates. Up to the limit, repeated shapes are as fast as before. It
    holds if no such product was computed before.
    """
    for name, value in PRODUCT_CACHES.items():
        os.environ.setdefault(name, value)


def _has_other_allocator() -> bool:
    """Returns whether the environment replaces or configures the allocator."""
    return (
        "malloc" in os.environ.get("LD_PRELOAD", "")
        or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
        or any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    )


def _addresses_are_counted() -> bool:
    """Returns whether reserved addresses count against a limit or the memory before they are used."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        # 2: the system promises no more memory than it has.
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def _reserve(c: ctypes.CDLL, size: int) -> None:
    """Extends the region by ``size`` bytes and requests huge pages there."""
    if _addresses_are_counted():
        return
    c.malloc.argtypes, c.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    c.free.argtypes, c.free.restype = [ctypes.c_void_p], None
    c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = c.malloc(size)
    if start is None:
        return
    first = -(-start // LARGE_PAGE) * LARGE_PAGE
    length = (start + size) // LARGE_PAGE * LARGE_PAGE - first
    # A system without huge pages refuses, and nothing changes.
    c.madvise(first, length, MADV_HUGEPAGE)
    # The block was never touched; free merges it into the region's end, from which new blocks come.
    c.free(start)
