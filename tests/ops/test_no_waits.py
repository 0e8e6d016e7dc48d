"""Nothing inside a training batch makes the host wait for a GPU.

Every operation that hands a value or a data-dependent shape to Python is noticed where it is asked for. That
is seen on the CPU, with tensors that say of themselves that they are on a GPU.
"""

import contextlib
import traceback
from unittest import mock

import pytest
import torch
from helpers import tiny_char_lm, training_batches
from helpers.fused_cells import FUSED_CELLS
from torch.utils._python_dispatch import TorchDispatchMode

from rhhn_fairseq.cells.registry import CELLS

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
    aten.unique_consecutive,
    aten.unique_dim,
    aten.bincount,
    aten.repeat_interleave,
}

# These read memory without an operation.
READS = ("tolist", "numpy", "cpu")


class Waits(TorchDispatchMode):
    """Collects the lines of this package that ask for a value."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        asks = function.overloadpacket in WAITS
        if function.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            asks = any(part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1])
        if asks:
            self.note()
        return function(*args, **kwargs or {})

    def note(self):
        frames = [f for f in traceback.extract_stack() if "rhhn_fairseq/" in f.filename]
        self.lines += [f"{f.filename}:{f.lineno} {f.line}" for f in frames[-1:]] or ["elsewhere"]

    def noting(self, name):
        """The method of a tensor, which reads its values."""
        method = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            self.note()
            return method(tensor, *args, **kwargs)

        return read


@contextlib.contextmanager
def waiting():
    with contextlib.ExitStack() as patches:
        waits = patches.enter_context(Waits())
        for name in READS:
            patches.enter_context(mock.patch.object(torch.Tensor, name, waits.noting(name)))
        yield waits


def lines_that_wait(model, criterion, sample) -> list[str]:
    """Of a forward and a backward pass in training."""
    model.train()
    with mock.patch.object(torch.Tensor, "is_cuda", True, create=True), waiting() as waits:
        loss = criterion(model, sample)[0]
        loss.backward()
    return waits.lines


LOOKS = {
    "item": lambda x: x.sum().item(),
    "mask": lambda x: x[x > 0],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_at_a_value_is_noticed(look):
    with waiting() as waits:
        LOOKS[look](torch.ones(3))
    assert waits.lines == ["elsewhere"]


LOOPS = [(name, "reference") for name in CELLS]
WHOLE = [(name, "aten") for name, entry in CELLS.items() if entry.cell in FUSED_CELLS]


@pytest.mark.parametrize("cell, backend", LOOPS + WHOLE)
def test_char_lm(cell, backend, char_task, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", backend)
    assert lines_that_wait(*training_batches.char_lm(cell, char_task)) == []


@pytest.fixture(scope="module")
def char_task(tmp_path_factory):
    return tiny_char_lm.build_task(tiny_char_lm.write_corpus(tmp_path_factory.mktemp("corpus")))


@pytest.mark.parametrize("family", training_batches.FAMILIES)
def test_families(family, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "reference")
    assert lines_that_wait(*training_batches.of_family(family)) == []
