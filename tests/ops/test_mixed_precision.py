"""Every model trains in half precision: cast as --bf16 and --fp16 do, and under autocast as --amp does."""

import contextlib
import copy

import pytest
import torch
from fairseq.utils import apply_to_sample
from helpers import tiny_char_lm, training_batches
from helpers.fused_cells import FUSED_CELLS

from rhhn_fairseq.cells.registry import CELLS
from rhhn_fairseq.ops import native

PRECISIONS = [
    (precision, dtype) for precision in ("cast", "autocast") for dtype in (torch.bfloat16, torch.float16)
]
precisions = pytest.mark.parametrize(
    "precision, dtype", PRECISIONS, ids=lambda value: str(value).removeprefix("torch.")
)
BACKENDS = [
    (name, backend)
    for name, entry in CELLS.items()
    for backend in (("reference", "aten", "native") if entry.cell in FUSED_CELLS else ("reference",))
    # Its states, and so any rounding, grow without bounds.
    if name != "irnn"
]
# Of the two types of --amp, one is quick.
CASES = [
    pytest.param(
        *backend, *precision, marks=[pytest.mark.slow] if precision == ("autocast", torch.float16) else []
    )
    for backend in BACKENDS
    for precision in PRECISIONS
    # The compiled kernels may not be built, and have no float16.
    if "native" not in backend or (native.library() is not None and torch.float16 not in precision)
]

ERRORS = {torch.bfloat16: (0.004, 0.1), torch.float16: (0.001, 0.02)}
"""Of loss and gradients. Measured with these seeds: up to 0.0013 and 0.042, and 0.0004 and 0.0064."""


def losses_and_gradients(model, criterion, sample, precision, dtype):
    """The loss of a training pass and all gradients in one vector."""
    model, around = copy.deepcopy(model).train(), contextlib.nullcontext()
    if precision == "cast":
        model = model.to(dtype)
        # fairseq's trainer casts what is float32, too.
        sample = apply_to_sample(lambda x: x.to(dtype) if x.dtype == torch.float32 else x, sample)
    elif precision == "autocast":
        around = torch.autocast("cpu", dtype=dtype)
    torch.manual_seed(0)
    with around:
        loss = criterion(model, sample)[0]
    loss.backward()
    gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
    assert all(gradient.dtype == parameter.dtype for parameter, gradient in gradients)
    return loss.item(), torch.cat([gradient.flatten().double() for _, gradient in gradients])


def assert_trains(training, precision, dtype):
    exact_loss, exact = losses_and_gradients(*training, "exact", None)
    loss, found = losses_and_gradients(*training, precision, dtype)
    of_loss, of_gradients = ERRORS[dtype]
    assert abs(loss - exact_loss) <= of_loss * abs(exact_loss)
    assert (found - exact).norm() <= of_gradients * exact.norm()


@pytest.fixture(scope="module")
def char_task(tmp_path_factory):
    return tiny_char_lm.build_task(tiny_char_lm.write_corpus(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


@pytest.mark.parametrize(
    "cell, backend, precision, dtype", CASES, ids=lambda value: str(value).removeprefix("torch.")
)
def test_char_lm(cell, backend, precision, dtype, char_task, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", backend)
    assert_trains(training_batches.char_lm(cell, char_task), precision, dtype)


@precisions
@pytest.mark.parametrize("family", training_batches.FAMILIES)
def test_families(family, precision, dtype):
    assert_trains(training_batches.of_family(family), precision, dtype)
