"""Freed memory that is kept: blocks come back without new pages, and the environment has the last word."""

import os
import platform
import subprocess
import sys

import pytest
from helpers.cli import HANGS

from rhhn_fairseq.ops.memory import PRODUCT_CACHES

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

FAULTS = """
import resource, torch
from rhhn_fairseq.ops.memory import keep_freed_memory, keeps_freed_memory
keep_freed_memory()
keep_freed_memory()

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        blocks = [torch.empty(1 << 20, 16).fill_(1.0) for _ in range(2)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages()
print(keeps_freed_memory(), pages())
"""

SMALL_PAGES = """
import ctypes
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    ours = ("GLIBC_TUNABLES", "LD_PRELOAD", "RHHN_KEEP_MEMORY", *PRODUCT_CACHES)
    others = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("MALLOC_")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS, env=others | environment
    )


def faults(first: str = "", **environment: str) -> tuple[bool, int]:
    """Whether memory is kept, and how many pages ten blocks of 64 MB took after ten others."""
    result = python(first + FAULTS, **environment)
    assert result.returncode == 0, result.stderr
    kept, pages = result.stdout.split()
    return kept == "True", int(pages)


def test_blocks_come_back_without_new_pages():
    kept, pages = faults(RHHN_KEEP_MEMORY="1")
    # Ten blocks of 64 MB are at most 320 pages of 2 MB; of 4 KB they would be 163,840.
    assert kept and pages <= 320


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"RHHN_KEEP_MEMORY": "0"},
        {"RHHN_KEEP_MEMORY": "1", "MALLOC_ARENA_MAX": "2", "MALLOC_TOP_PAD_": "0"},
    ],
)
def test_left_alone(environment):
    kept, pages = faults(SMALL_PAGES, **environment)
    assert not kept and pages > 10_000


@pytest.mark.slow
def test_limited_address_space_is_not_reserved():
    code = (
        "import resource\nimport torch\n"
        "resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))\n"
        "size = lambda: int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "before = size()\n"
        "from rhhn_fairseq.ops.memory import keep_freed_memory, keeps_freed_memory\n"
        "keep_freed_memory()\n"
        "print(keeps_freed_memory(), size() - before < 1 << 28)"
    )
    result = python(code, RHHN_KEEP_MEMORY="1")
    assert result.stdout.split() == ["True", "True"], result.stderr


PRODUCTS = """
import ctypes, sys, torch
from rhhn_fairseq.ops.memory import limit_product_caches

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "a b c d mapped e f used g h".split()]

def used():
    info = mallinfo()
    return info.used + info.mapped

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info
if sys.argv[1] == "limited":
    limit_product_caches()
torch.set_num_threads(1)
torch.set_float32_matmul_precision("medium")
weight = torch.randn(64, 96)
torch.randn(20, 64) @ weight
before = used()
for rows in range(100, 900):
    torch.randn(rows, 64) @ weight
print((used() - before) / 1e6)
"""


def test_products_of_many_shapes_take_little_memory():
    """Each shape's product in medium precision is compiled, and kept up to a limit."""
    if tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 33):
        pytest.skip("this glibc has no mallinfo2")
    grown = {}
    for kind in ("limited", "as it is"):
        result = python(f"import sys; sys.argv = ['', {kind!r}]\n{PRODUCTS}")
        assert result.returncode == 0, result.stderr
        grown[kind] = float(result.stdout)
    # Measured: 94 and 450 MB with AVX-512. Elsewhere torch may compile nothing.
    if grown["as it is"] < 50:
        pytest.skip("this processor's products are not compiled by shape")
    assert grown["limited"] < grown["as it is"] / 2
