"""The memory of a process that computes on the CPU: kept when it is freed, and in large pages.

The C library gives large blocks back to the system as soon as they are freed and asks for new ones at the
next update. Every page of these comes as an interrupt and is filled with zeros: an LSTM of 128 units over
100 sequences of 320 steps takes 50,000 pages an update, a third of its time. Kept blocks come back as they
are, and pages of 2 MB in place of 4 KB need fewer interrupts the first time and fewer look-ups ever after.
"""

import ctypes
import logging
import os
import resource
import sys
from pathlib import Path

import torch

from rhhn_fairseq.errors import UsageError

logger = logging.getLogger(__name__)

VARIABLE = "RHHN_KEEP_MEMORY"
LARGE_PAGE = 2 << 20

# From malloc.h and sys/mman.h of Linux.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
MADV_HUGEPAGE = 14

_kept = False


def keeps_freed_memory() -> bool:
    """Whether ``keep_freed_memory`` has set this process up."""
    return _kept


def keep_freed_memory() -> None:
    """Has the process keep what it frees, if RHHN_KEEP_MEMORY is 1, or unset where no GPU computes.

    All later blocks then come from one region that grows and never shrinks, of large pages where the system
    has them. It is reserved at half of the machine's memory, which costs nothing until it is used; where a
    limit or the system counts addresses all the same, nothing is reserved. What a process needs at its peak
    it keeps to its end, and that peak is higher, as blocks come to lie between each other. Nothing happens
    where the allocator is not glibc's own (other systems, ``LD_PRELOAD``), or where the environment sets it
    up (``GLIBC_TUNABLES``, ``MALLOC_*_``). Logged; a second call changes nothing.

    Raises:
        UsageError: the variable holds something other than 0 or 1.
    """
    global _kept
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UsageError(f"{VARIABLE}={value} is unknown, choose from 0, 1")
    if _kept or value == "0" or (not value and torch.cuda.is_available()) or _has_other_allocator():
        return
    c = _c_library()
    if c is None:
        return
    # Blocks of their own are what is given back at once; without them, all comes from the region.
    c.mallopt(M_MMAP_MAX, 0)
    c.mallopt(M_TRIM_THRESHOLD, -1)
    _reserve(c, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    _kept = True
    logger.info("this process keeps freed memory for the next update (%s=0 gives it back)", VARIABLE)


def _has_other_allocator() -> bool:
    """Whether whoever started the process has set the allocator up."""
    return (
        "malloc" in os.environ.get("LD_PRELOAD", "")
        or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
        or any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ)
    )


def _c_library() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    c = ctypes.CDLL(None)
    if not hasattr(c, "gnu_get_libc_version") or not hasattr(c, "mallopt"):
        return None
    c.malloc.argtypes, c.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    c.free.argtypes, c.free.restype = [ctypes.c_void_p], None
    c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return c


def _addresses_are_counted() -> bool:
    """Whether addresses are limited or taken from others even before they are used."""
    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    if any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits):
        return True
    try:
        # 2: the system promises no more memory than it has.
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return False


def _reserve(c: ctypes.CDLL, size: int) -> None:
    """Lets the region reach ``size`` bytes further, and asks for large pages there."""
    if _addresses_are_counted():
        return
    start = c.malloc(size)
    if start is None:
        return
    first = -(-start // LARGE_PAGE) * LARGE_PAGE
    length = (start + size) // LARGE_PAGE * LARGE_PAGE - first
    # A system without large pages refuses, and all stays as it was.
    c.madvise(first, length, MADV_HUGEPAGE)
    # The block was never touched; free joins it with the region's end, where new blocks come from.
    c.free(start)
