"""Compiled matrix products as tests need them."""

import pytest
import torch

from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.native import build as builds

EPSILON = torch.finfo(torch.float32).eps


def with_every_build():
    """Loads every build of the library that this processor can run, one after another."""
    here = sorted(builds.Path(builds.__file__).parent.glob("_*.so"))
    can = builds.LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("any",))
    for path in (path for path in here if path.name.split(".")[0].removeprefix("_") in can):
        library = builds.load(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "compiled", lambda library=library: library)
            yield


def draw_matrix(rows, columns, transposed, skipped, draw):
    """A matrix whose rows, or columns, are farther apart than they are long."""
    if transposed:
        return torch.randn(columns, rows + skipped, generator=draw)[:, skipped:].t()
    return torch.randn(rows, columns + skipped, generator=draw)[:, skipped:]


def assert_product(x, w, add, results):
    """That ``results`` is ``x @ w + add`` as far as float32 can be."""
    added = torch.zeros(1) if add is None else add
    exact = x.double() @ w.double() + added.double()
    # Every sum of K products errs by less than K units in the last place of the sum of their sizes.
    sizes = x.double().abs() @ w.double().abs() + added.double().abs()
    assert results.shape == exact.shape
    assert bool(((results.double() - exact).abs() <= (x.shape[-1] + 1) * EPSILON * sizes).all())


def choose(monkeypatch, word: str) -> None:
    """Forces large products of float32 matrices to be native's or torch's."""
    monkeypatch.setenv("RHHN_MATMUL", word)
    gemm.preferred.cache_clear()


def forced_products(monkeypatch):
    """Has them be native's, of every size; for a fixture, which yields the list of calls."""
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    choose(monkeypatch, "native")
    for name in "SMALLEST SMALLEST_PRODUCT SMALLEST_WITH_GRADIENT ROWS ROWS_BY_COLUMNS".split():
        monkeypatch.setattr(gemm, name, 1)
    calls, multiply = [], native.matmul

    def counted(*arguments):
        calls.append(arguments)
        return multiply(*arguments)

    monkeypatch.setattr(native, "matmul", counted)
    yield calls
    gemm.preferred.cache_clear()
