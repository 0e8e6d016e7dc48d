"""Compiled matrix products as tests need them."""

import torch

from rhhn_fairseq.kernels import matmul, native


def builds():
    """Every build of the library that this processor can run."""
    here = sorted(p for p in native.Path(native.__file__).parent.glob("_*.so"))
    can = native.LEVELS.get(torch.backends.cpu.get_cpu_capability(), ("any",))
    return [path for path in here if path.name.split(".")[0].removeprefix("_") in can]


def choose(monkeypatch, word: str) -> None:
    """Forces products of float32 matrices to be native's or torch's."""
    monkeypatch.setenv(matmul.VARIABLE, word)
    matmul.chosen.cache_clear()


def native_products(monkeypatch):
    """Has them be compiled code, of every size; for a fixture, which yields the list of calls."""
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    choose(monkeypatch, "native")
    for name in ("SMALLEST", "SMALLEST_WITH_GRADIENT", "FEWEST_ROWS", "FEWEST_ROWS_BY_COLUMNS"):
        monkeypatch.setattr(matmul, name, 1)
    calls = []
    multiply = native._multiply

    def counted(*arguments, **others):
        calls.append(arguments)
        multiply(*arguments, **others)

    monkeypatch.setattr(native, "_multiply", counted)
    yield calls
    matmul.chosen.cache_clear()
