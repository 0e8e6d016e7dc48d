"""Products of a few rows and the LSTM's step by compiled code, against float64 and against the loop."""

import pytest
import torch
from helpers.products import assert_product, draw_matrix, with_every_build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from rhhn_fairseq.cells.registry import build_cell
from rhhn_fairseq.ops import native
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.matmul.gemm import affine


@pytest.fixture
def small(monkeypatch):
    """Every size is large enough."""
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    for name in ("FEW_ROWS_SMALLEST", "FEW_ROWS_INPUT", "SMALLEST_PRODUCT"):
        monkeypatch.setattr(gemm, name, 1)


@settings(max_examples=60, deadline=None)
@given(
    M=st.integers(1, 8),
    K=st.integers(1, 70),
    N=st.integers(1, 70),
    transposed=st.booleans(),
    added=st.sampled_from(["nothing", "row", "rows"]),
    skipped=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_every_build_multiplies(M, K, N, transposed, added, skipped, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=draw)
    weight = draw_matrix(K, N, transposed, skipped, draw)
    add = {"nothing": None, "row": torch.randn(N, generator=draw), "rows": torch.randn(M, N, generator=draw)}
    for _ in with_every_build():
        y = torch.full((M, N), float("nan"))
        native.multiply_few_rows(x, weight, y, add[added])
        assert_product(x, weight, add[added], y)


@pytest.mark.parametrize("M, K, N", [(5, 512, 2048), (2, 513, 8001)])
@pytest.mark.parametrize("transposed", [False, True])
def test_threads_share_the_columns(M, K, N, transposed, monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    x, weight, add = torch.randn(M, K), torch.randn(K, N), torch.randn(N)
    if transposed:
        weight = weight.t().contiguous().t()
    results = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with torch.no_grad():
                assert gemm.fits_few_rows(x, weight) == native.multiplies()
                results.append(affine(x, weight, add))
        finally:
            torch.set_num_threads(before)
    assert_product(x, weight, add, results[0])
    if native.multiplies():
        assert torch.equal(*results)


def test_not_a_number_passes_through(small):
    x, weight = torch.randn(3, 20), torch.randn(20, 40)
    x[1, 4], weight[7, 9] = float("nan"), float("inf")
    with torch.no_grad():
        y = affine(x, weight)
    assert y[1].isnan().all()
    assert not y[0, :9].isnan().any()
    assert y[0, 9].isinf()


def test_rows_of_a_step_or_a_beam_are_compiled(small, monkeypatch):
    x, weight = torch.randn(4, 20), torch.randn(20, 40)
    calls = []
    monkeypatch.setattr(native, "multiply_few_rows", lambda *args: calls.append(args))
    with torch.no_grad():
        affine(x, weight)
        affine(x.unsqueeze(0), weight.t().contiguous().t(), torch.randn(40))
    assert len(calls) == (2 if native.multiplies() else 0)


REASONS = "gradient rows row double bfloat16 autocast forced products precision strides size build"


@pytest.mark.parametrize("why", REASONS.split())
def test_other_products_are_torchs(why, small, monkeypatch):
    x, weight = torch.randn(4, 20), torch.randn(20, 40)
    if why in ("rows", "row"):
        x = torch.randn(9 if why == "rows" else 1, 20)
    if why in ("double", "bfloat16"):
        dtype = getattr(torch, why)
        x, weight = x.to(dtype), weight.to(dtype)
    if why == "forced":
        monkeypatch.setenv("RHHN_KERNEL", "reference")
    if why == "products":
        monkeypatch.setenv("RHHN_MATMUL", "torch")
    if why == "precision":
        monkeypatch.setattr(gemm, "matmul_precision", lambda _: "medium")
    if why == "strides":
        weight = torch.randn(20, 80)[:, ::2]
    if why == "size":
        monkeypatch.setattr(gemm, "FEW_ROWS_SMALLEST", 801)
    if why == "build":
        monkeypatch.setattr(native, "multiplies", lambda: False)
    with torch.set_grad_enabled(why == "gradient"), torch.autocast("cpu", enabled=why == "autocast"):
        if why != "gradient":
            assert not gemm.fits_few_rows(x, weight)
        monkeypatch.setattr(native, "multiply_few_rows", None)
        torch.testing.assert_close(affine(x, weight), x @ weight, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["lstm", "rhn"])
def test_a_traced_network_computes_its_products(name, small):
    cell = build_cell(name, 30, 50).eval()
    with torch.no_grad():
        traced = torch.jit.trace(cell, (torch.randn(2, 4, 30),), check_trace=False)
        x = torch.randn(2, 4, 30)
        torch.testing.assert_close(traced(x)[0], cell(x)[0])


@pytest.fixture
def no_addresses(small, monkeypatch):
    """Fails where C++ would read an address that holds no numbers."""
    monkeypatch.setattr(native, "multiply_few_rows", None)
    monkeypatch.setattr(native, "lstm_gates", None)


@pytest.mark.parametrize("name", ["lstm", "rhn"])
def test_fake_tensors_have_no_addresses(name, no_addresses):
    with FakeTensorMode(), torch.no_grad():
        y, _ = build_cell(name, 30, 50).eval()(torch.randn(1, 4, 30))
    assert y.shape == (1, 4, 50)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_tensors_that_hold_others_have_no_addresses(which, no_addresses):
    parts = [torch.randn(4, 20), torch.randn(20, 40), torch.randn(40)]
    expected = torch.addmm(parts[2], *parts[:2])
    parts[which] = TwoTensor(parts[which], parts[which].clone())
    with torch.no_grad():
        y = affine(*parts)
    torch.testing.assert_close(y.a, expected)


@pytest.mark.parametrize("shape, adds", [((3, 19), None), ((3, 20), (39,))])
def test_what_does_not_fit_is_an_error(shape, adds, small):
    add = None if adds is None else torch.randn(*adds)
    with torch.no_grad(), pytest.raises(RuntimeError):
        affine(torch.randn(*shape), torch.randn(20, 40), add)


def test_a_row_for_all_rows_is_added_as_torch_does(small):
    x, weight, add = torch.randn(3, 20), torch.randn(20, 40), torch.randn(1, 40)
    with torch.no_grad():
        torch.testing.assert_close(affine(x, weight, add), torch.addmm(add, x, weight))


def test_a_gradient_passes_through_the_same_function(small):
    x, weight, add = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3, 4), (4, 5), (5,)))
    parts = [part.requires_grad_() for part in (x, weight, add)]
    assert torch.autograd.gradcheck(affine, parts)


@pytest.mark.parametrize("forget_bias", [0.0, 1.0])
@pytest.mark.parametrize("B", [1, 2, 5, 8, 9])
def test_a_step_of_an_lstm_equals_the_loop(forget_bias, B, small, monkeypatch):
    torch.manual_seed(B)
    cell = build_cell("lstm", 30, 50, forget_bias=forget_bias).eval()
    torch.nn.init.normal_(cell.bias)
    x, state = torch.randn(1, B, 30), (torch.randn(B, 50), torch.randn(B, 50))
    with torch.no_grad():
        monkeypatch.setenv("RHHN_KERNEL", "reference")
        y, after = cell.double()(x.double(), tuple(part.double() for part in state))
        monkeypatch.delenv("RHHN_KERNEL")
        cell.float()
        assert cell.fits_few_rows(state) == (B in native.FEW_ROWS and native.multiplies())
        found, found_after = cell(x, state)
    # Measured: up to 8e-7, with sums of 80 terms around 9 in size.
    for one, other in zip((found, *found_after), (y, *after), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=5e-6)
