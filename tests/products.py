"""Compiled matrix products as tests need them."""

import ctypes

import pytest
import torch

from rhhn_fairseq.kernels import matmul, native

EPSILON = torch.finfo(torch.float32).eps


def with_every_build():
    """Loads every build of the library that this processor can run, one after another."""
    here = sorted(p for p in native.Path(native.__file__).parent.glob("_*.so"))
    can = native.LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("any",))
    for path in (path for path in here if path.name.split(".")[0].removeprefix("_") in can):
        library = ctypes.CDLL(str(path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", lambda library=library: library)
            yield


def draw_matrix(rows, columns, transposed, skipped, draw):
    """A matrix whose rows, or columns, are farther apart than they are long."""
    if transposed:
        return torch.randn(columns, rows + skipped, generator=draw)[:, skipped:].t()
    return torch.randn(rows, columns + skipped, generator=draw)[:, skipped:]


def assert_product(x, w, add, found):
    """That ``found`` is ``x @ w + add`` as far as float32 can be."""
    added = torch.zeros(1) if add is None else add
    exact = x.double() @ w.double() + added.double()
    # Every sum of K products errs by less than K units in the last place of the sum of their sizes.
    sizes = x.double().abs() @ w.double().abs() + added.double().abs()
    assert found.shape == exact.shape
    assert bool(((found.double() - exact).abs() <= (x.shape[-1] + 1) * EPSILON * sizes).all())


def choose(monkeypatch, word: str) -> None:
    """Forces products of float32 matrices to be native's, oneDNN's or torch's."""
    monkeypatch.setenv(matmul.VARIABLE, word)
    matmul.chosen.cache_clear()


def forced_products(monkeypatch, word: str):
    """Has them be native's or oneDNN's, of every size; for a fixture, which yields the list of calls."""
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    choose(monkeypatch, word)
    names = "SMALLEST SMALLEST_WITH_GRADIENT FEWEST_ROWS FEWEST_ROWS_BY_COLUMNS LARGE_TRANSPOSE"
    for name in names.split():
        monkeypatch.setattr(matmul, name, 1)
    monkeypatch.setattr(matmul, "COPIED_COLUMNS", 7)
    calls = []
    module, name = {"native": (native, "_multiply"), "onednn": (matmul, "_by_onednn")}[word]
    multiply = getattr(module, name)

    def counted(*arguments, **others):
        calls.append(arguments)
        return multiply(*arguments, **others)

    monkeypatch.setattr(module, name, counted)
    yield calls
    matmul.chosen.cache_clear()
