"""The Triton kernels against the loop over ``step``; run by test_triton.py in a process of its own.

With TRITON_INTERPRET=1 they run in Triton's interpreter on the CPU, without it on the CUDA device: which of
the two is settled for a whole process when triton is imported.
"""

import os

import pytest
import torch
from helpers.fused_cells import GATED_NOISE, RHN_NOISE, assert_equal, backends, doubled, run_pass

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.ops import sequence
from rhhn_fairseq.ops.triton import slots, steps

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

HYPER = dict(hyper_size=3, hyper_embed_size=2)
FAMILIES = {
    "lstm": ({}, GATED_NOISE),
    "ln_lstm": ({}, GATED_NOISE),
    "hyperlstm": (HYPER, GATED_NOISE),
    "ln_hyperlstm": (HYPER, GATED_NOISE),
    "rhn": (dict(rhn_depth=3), RHN_NOISE),
    "hyperrhn": (dict(hyper_size=3, rhn_depth=3), RHN_NOISE),
}
"""By cell: its sizes, and the options that switch on every regulariser."""

families = pytest.mark.parametrize("name", FAMILIES)


def make(name, C=4, H=5, dtype=torch.float64, **options):
    torch.manual_seed(0)
    cell = build_cell(name, C, H, **FAMILIES[name][0] | options)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return cell.to(DEVICE, dtype)


def results(cell, x, backend, monkeypatch, state=None, mask=None, noise=None):
    return run_pass(cell, x, state, mask, noise, backend, monkeypatch)


@families
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noisy"])
def test_equals_the_loop(name, padded, noisy, monkeypatch):
    cell = make(name, **(FAMILIES[name][1] if noisy else {}))
    T, B = 3, 4
    x, mask = torch.randn(T, B, 4, dtype=torch.float64, device=DEVICE), None
    state = tuple(torch.randn(B, size, dtype=torch.float64, device=DEVICE) for size in cell.state_sizes)
    if padded:
        # A hole in the middle, padding on either side, and NaN, which no product with zero would hide.
        mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 0]], dtype=torch.bool, device=DEVICE)
        x[~mask] = float("nan")
    for noise in (cell.sample_noise(T, B, DEVICE), None):
        # Without noise zoneout keeps its expectation.
        cell.train(noise is not None)
        exact = results(cell, x, "reference", monkeypatch, state, mask, noise)
        found = results(cell, x, "triton", monkeypatch, state, mask, noise)
        # Measured: below 2e-14, with three units in a normalised hypernetwork. Where the loop's gradient of
        # padding is NaN, so is this one.
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one.isnan(), other.isnan())
            one, other = one.nan_to_num(), other.nan_to_num()
            assert (one - other).norm() <= 1e-13 * (1 + other.norm())


@pytest.mark.parametrize("name", ["lstm", "ln_hyperlstm"])
def test_one_dropout_mask_for_a_sequence(name, monkeypatch):
    cell = make(name, recurrent_dropout=0.5, recurrent_mask="sequence")
    x = torch.randn(3, 2, 4, dtype=torch.float64, device=DEVICE)
    noise = cell.sample_noise(3, 2, DEVICE)
    assert len(noise["update"]) == 1
    exact = results(cell, x, "reference", monkeypatch, noise=noise)
    assert_equal(results(cell, x, "triton", monkeypatch, noise=noise), exact, 1e-13)


@pytest.mark.parametrize("name", ["rhn", "hyperrhn"])
@pytest.mark.parametrize("depth", [1, 2])
def test_first_step_without_its_bias(name, depth, monkeypatch):
    cell = make(name, first_step="skip", rhn_depth=depth)
    x = torch.randn(4, 3, 4, dtype=torch.float64, device=DEVICE)
    mask = torch.ones(4, 3, dtype=torch.bool, device=DEVICE)
    mask[:2, 1] = False
    exact = results(cell, x, "reference", monkeypatch, mask=mask)
    assert_equal(results(cell, x, "triton", monkeypatch, mask=mask), exact, 1e-13)


@pytest.mark.parametrize("name", ["hyperlstm", "ln_hyperlstm"])
def test_embeddings_from_the_previous_state(name, monkeypatch):
    cell = make(name, hyper_state="previous")
    x = torch.randn(3, 2, 4, dtype=torch.float64, device=DEVICE)
    exact = results(cell, x, "reference", monkeypatch)
    assert_equal(results(cell, x, "triton", monkeypatch), exact, 1e-13)


@families
@pytest.mark.parametrize("T, B, H", [(3, 1, 1), (2, 3, 17), (2, 9, 129), (1, 2, 1000)])
def test_odd_shapes_in_float32(name, T, B, H, monkeypatch):
    sizes = {"hyper_size": 1} if H == 1 and "hyper" in name else {}
    oracle, single = make(name, H=H, **sizes), make(name, H=H, **sizes).float()
    x = torch.randn(T, B, 4, device=DEVICE)
    exact = results(oracle, x.double(), "reference", monkeypatch)
    plain = results(single, x, "reference", monkeypatch)
    found = results(single, x, "triton", monkeypatch)
    for one, other, truth in zip(found, plain, exact, strict=True):
        own, error = (other - truth).norm(), (one - truth).norm()
        # The order of summation differs, so the errors do, but not their magnitude. The gradient of one
        # normalised unit is zero, for which an H200 computed 1.1e-6.
        floor = 4e-6 if H == 1 and name.startswith("ln_") else 1e-6
        assert error <= 4 * own + floor * (1 + truth.norm())


@pytest.mark.parametrize("name", ["hyperlstm", "ln_hyperlstm", "rhn", "hyperrhn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backward_in_parts(name, dtype, monkeypatch):
    monkeypatch.setattr(sequence, "BLOCK_ROWS", 36)
    noisy = FAMILIES[name][1]
    cell, oracle = make(name, dtype=dtype, **noisy), make(name, **noisy)
    x = torch.randn(5, 18, 4, dtype=torch.float64, device=DEVICE)
    noise = cell.sample_noise(5, 18, DEVICE)
    exact = results(oracle, x, "reference", monkeypatch, noise=doubled(noise))
    found = results(cell, x.to(dtype), "triton", monkeypatch, noise=noise)
    # Measured in float32: below 2e-6, with three units in a normalised hypernetwork.
    assert_equal(found, exact, 1e-13 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("name", ["hyperlstm", "ln_hyperlstm"])
def test_scaling_gradients_in_groups_of_steps(name, monkeypatch):
    monkeypatch.setattr(steps, "KEPT_STEPS", 2)
    cell = make(name)
    x = torch.randn(5, 3, 4, dtype=torch.float64, device=DEVICE)
    exact = results(cell, x, "reference", monkeypatch)
    assert_equal(results(cell, x, "triton", monkeypatch), exact, 1e-13)


@families
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noisy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_less_than_the_loop(name, noisy, dtype, monkeypatch):
    T, B, H = 6, 4, 32
    # Normalising three units, as the other tests' hypernetworks would, multiplies every rounding.
    options = ({"hyper_size": 32} if "hyper" in name else {}) | (FAMILIES[name][1] if noisy else {})
    half = make(name, 16, H, dtype, **options)
    # Parameters that the type holds exactly, so that rounding them is no error.
    oracle = make(name, 16, H, **options)
    oracle.load_state_dict({key: value.double() for key, value in half.state_dict().items()})
    x = torch.randn(T, B, 16, device=DEVICE).to(dtype)
    noise = half.sample_noise(T, B, DEVICE) if noisy else None
    exact = results(oracle, x.double(), "reference", monkeypatch, noise=doubled(noise))
    errors = {}
    for backend in ("reference", "triton"):
        pairs = zip(results(half, x, backend, monkeypatch, noise=noise), exact, strict=True)
        errors[backend] = max(((part.double() - truth).norm() / truth.norm()).item() for part, truth in pairs)
    # States and sums are float32 here and bfloat16 in the loop. Measured in the interpreter, of four inputs:
    # 0.33 to 0.63 times the loop's error.
    assert errors["triton"] <= errors["reference"] and errors["triton"] < 0.05


@families
def test_same_result_in_every_run(name, monkeypatch):
    cell = make(name, 4, 129, torch.float32)
    x = torch.randn(2, 20, 4, device=DEVICE)
    assert slots((129,), x[0].new_empty(20, 129)) == 5
    once, again = (results(cell, x, "triton", monkeypatch) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@families
def test_a_token_at_a_time(name, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "triton")
    cell = make(name).eval()
    x, state, found = torch.randn(3, 2, 4, dtype=torch.float64, device=DEVICE), None, []
    with torch.no_grad():
        whole, _ = cell(x)
        for x_1BC in x.split(1):
            y, state = cell(x_1BC, state)
            found.append(y)
    torch.testing.assert_close(torch.cat(found), whole, rtol=0, atol=1e-13)


@families
def test_extreme_sums_stay_finite_and_nan_passes_through(name, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "triton")
    cell = make(name, 4, 33, torch.float32)
    x = (torch.randn(3, 2, 4, device=DEVICE) * 1e4).requires_grad_()
    y, _ = cell(x)
    y.sum().backward()
    assert torch.isfinite(y).all() and y.abs().max() <= 1.0001
    assert torch.isfinite(x.grad).all()
    broken = torch.randn(3, 2, 4, device=DEVICE)
    broken[1, 0] = float("nan")
    y, _ = cell(broken)
    assert y[1:, 0].isnan().all() and torch.isfinite(y[:, 1]).all() and torch.isfinite(y[0]).all()


def test_it_comes_first_on_a_gpu_only():
    available = backends(make("lstm"), DEVICE)
    assert "triton" in available and (available[0] == "triton") == (DEVICE == "cuda")
