"""Products of float32 matrices by compiled code, against float64, and where they are used."""

import logging
from unittest import mock

import pytest
import torch
from helpers.products import EPSILON, assert_product, choose, draw_matrix, forced_products, with_every_build
from hypothesis import given, settings
from hypothesis import strategies as st

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.output_loss import linear_cross_entropy
from rhhn_fairseq.ops import backends, native
from rhhn_fairseq.ops.matmul import gemm
from rhhn_fairseq.ops.matmul.gemm import affine

CLOSE = dict(rtol=1e-6, atol=12 * 20 * EPSILON)

needs_build = pytest.mark.skipif(not native.multiplies(), reason="needs the compiled kernels and AVX2")


@pytest.fixture
def calls(monkeypatch):
    """Products of every size are compiled: the list of calls."""
    if not native.multiplies():
        pytest.skip("needs the compiled kernels and AVX2")
    yield from forced_products(monkeypatch)


def _product(x, w, add, packed, skipped=0):
    """By ``native``, into rows that lie apart, of which nothing else may be written."""
    whole = torch.full((x.shape[0], w.shape[1] + 2 * skipped), float("nan"))
    out = whole[:, skipped : skipped + w.shape[1]]
    native.matmul(x, w, out, add, native.pack_if_faster(w) if packed else None)
    assert whole.isnan().sum() == 2 * skipped * len(x)
    return out


@settings(max_examples=80, deadline=None)
@given(
    M=st.integers(1, 40),
    K=st.integers(1, 70),
    N=st.integers(1, 130),
    x_transposed=st.booleans(),
    w_transposed=st.booleans(),
    packed=st.booleans(),
    added=st.sampled_from(["nothing", "row", "rows"]),
    skipped=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_every_build_multiplies(M, K, N, x_transposed, w_transposed, packed, added, skipped, seed):
    draw = torch.Generator().manual_seed(seed)
    x, w = draw_matrix(M, K, x_transposed, skipped, draw), draw_matrix(K, N, w_transposed, skipped, draw)
    add = {
        "nothing": None,
        "row": torch.randn(N, generator=draw),
        "rows": draw_matrix(M, N, False, skipped, draw),
    }
    for _ in with_every_build():
        assert_product(x, w, add[added], _product(x, w, add[added], packed, skipped))


# More than is packed out at a time of rows, of numbers of a row and of columns; panels that threads share.
LARGE = [(1100, 70, 90), (20, 3300, 60), (9, 40, 2600), (64, 1537, 49)]


@needs_build
@pytest.mark.parametrize("M, K, N", LARGE)
@pytest.mark.parametrize("transposed", ["", "xw"])
def test_parts_and_threads_give_the_same_bits(M, K, N, transposed):
    draw = torch.Generator().manual_seed(0)
    x, w = draw_matrix(M, K, "x" in transposed, 0, draw), draw_matrix(K, N, "w" in transposed, 0, draw)
    add = torch.randn(N, generator=draw)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results += [_product(x, w, add, packed) for packed in (False, True)]
    finally:
        torch.set_num_threads(threads)
    assert_product(x, w, add, results[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


@settings(max_examples=30, deadline=None)
@given(
    L=st.integers(1, 4),
    M=st.integers(1, 20),
    K=st.integers(1, 20) | st.just(1600),
    N=st.sampled_from([1, 16, 50, 96, 256]),
    transposed=st.sampled_from(["", "x", "w", "xw"]),
    added=st.sampled_from(["nothing", "stack", "out"]),
    seed=st.integers(0, 99),
)
def test_every_build_multiplies_stacks(L, M, K, N, transposed, added, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.stack([draw_matrix(M, K, False, 0, draw) for _ in range(L)], dim=1).transpose(0, 1)
    if "x" in transposed:
        x = torch.randn(L, K, M, generator=draw).transpose(1, 2)
    w = torch.randn(L, N, K, generator=draw).transpose(1, 2)
    if "w" not in transposed:
        w = w.contiguous()
    stack = torch.randn(L, M, N, generator=draw)
    for _ in with_every_build():
        with mock.patch.object(gemm, "is_large", lambda *_: True):
            out = stack.clone()
            gemm.mm(x, w, out, {"nothing": None, "stack": stack, "out": out}[added], "native")
        for i in range(L):
            assert_product(x[i], w[i], None if added == "nothing" else stack[i], out[i])


@needs_build
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_added_may_be_the_result_and_nan_stays_in_its_row(packed):
    x, w, out = torch.randn(10, 20), torch.randn(20, 50), torch.randn(10, 50)
    x[1, 4], w[7, 9] = float("nan"), float("inf")
    exact = out + x @ w
    native.matmul(x, w, out, out, native.pack_if_faster(w) if packed else None)
    torch.testing.assert_close(out, exact, equal_nan=True)
    assert out[1].isnan().all() and out[:, 9].isinf().sum() == 9


@needs_build
@pytest.mark.parametrize("why", ["w", "out", "add", "type", "strides"])
def test_what_does_not_fit_is_refused(why):
    operands = dict(x=torch.ones(4, 5), w=torch.ones(5, 6), out=torch.zeros(4, 6), add=torch.ones(6))
    if why in operands:
        operands[why] = torch.zeros(operands[why].shape[0] - 1, *operands[why].shape[1:])
    else:
        operands["out"] = operands["out"].double() if why == "type" else torch.zeros(6, 4).t()
    with pytest.raises(ValueError, match=r"\(4, 5\) by .* cannot be written to"):
        native.matmul(**operands)


@pytest.mark.parametrize(
    "shape, added",
    [((7, 9), "nothing"), ((7, 9), "row"), ((7, 9), "rows"), ((3, 4, 9), "row"), ((3, 4, 9), "nothing")],
)
def test_affine_has_its_gradients(shape, added, calls):
    x, w = torch.randn(*shape), torch.randn(9, 11)
    add = {"nothing": None, "row": torch.randn(11), "rows": torch.randn(7, 11)}[added]
    parts = [part.requires_grad_() for part in (x, w, add) if part is not None]
    doubles = [part.detach().double().requires_grad_() for part in parts]
    found, exact = affine(*parts), affine(*doubles)
    assert len(calls) == 1
    # Sums of at most twelve products below 20.
    torch.testing.assert_close(found.double(), exact, **CLOSE)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), parts)
    assert len(calls) == 3
    for one, other in zip(gradients, torch.autograd.grad((exact * weights).sum(), doubles), strict=True):
        torch.testing.assert_close(one.double(), other, **CLOSE)


@pytest.mark.parametrize("added", ["row", "rows"])
def test_a_single_column_may_have_any_stride(added, calls):
    x, w = torch.randn(7, 9), torch.randn(9, 1)
    add = torch.randn(1, 7)[:, 3] if added == "row" else torch.randn(1, 7).t()
    assert_product(x, w, add, affine(x, w, add))
    assert len(calls) == 1


@pytest.mark.parametrize("shape", [(0, 9), (0, 4, 9), (3, 0, 9)])
def test_nothing_has_a_projection(shape):
    x, w, add = torch.randn(*shape), torch.randn(9, 11), torch.randn(11)
    assert affine(x, w, add).shape == affine(x, w).shape == (*shape[:-1], 11)


def test_it_can_be_differentiated_twice(calls):
    x, w = torch.randn(7, 9, requires_grad=True), torch.randn(9, 11, requires_grad=True)

    def penalty(x, w):
        (gradient,) = torch.autograd.grad(affine(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, w])

    found = penalty(x, w)
    assert len(calls) > 3
    exact = penalty(*(part.detach().double().requires_grad_() for part in (x, w)))
    for one, other in zip(found, exact, strict=True):
        # Three products of float32 after one another; measured: below 5e-7.
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_it_is_an_operation_as_torch_wants_them(calls):
    x, w = torch.randn(7, 9, requires_grad=True), torch.randn(11, 9).t().requires_grad_()
    for add in (None, torch.randn(11, requires_grad=True), torch.randn(7, 11)):
        torch.library.opcheck(gemm._matmul, (x, w, add))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_loss_has_the_same_gradients(dtype, calls, monkeypatch):
    y, weight, bias = torch.randn(8, 30).t(), torch.randn(8, 20).t(), torch.randn(40)[::2]
    target, real = torch.randint(20, (30,)), torch.rand(30) > 0.2

    def run():
        parts = [part.detach().to(dtype).requires_grad_() for part in (y, weight, bias)]
        loss, *_ = linear_cross_entropy(*parts, target, real, smoothing=0.1, chunk=16)
        return torch.autograd.grad(loss, parts)

    found = run()
    assert bool(calls) == (dtype == torch.float32)
    choose(monkeypatch, "torch")
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other)


REASONS = "double bfloat16 medium autocast compile kernel choice"


@pytest.mark.parametrize("why", REASONS.split())
def test_other_products_are_torchs(why, calls, monkeypatch):
    x, w = torch.randn(10, 20), torch.randn(20, 40)
    if why in ("double", "bfloat16"):
        x, w = (part.to(getattr(torch, why)) for part in (x, w))
    if why == "kernel":
        monkeypatch.setenv("RHHN_KERNEL", "reference")
    if why == "compile":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if why == "choice":
        choose(monkeypatch, "torch")
    precision = torch.get_float32_matmul_precision()
    try:
        if why == "medium":
            torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
            assert gemm.select_gemm(x.dtype, x.device) == "torch"
            assert affine(x, w).dtype == (torch.bfloat16 if why in ("autocast", "bfloat16") else x.dtype)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert not calls


@pytest.mark.parametrize("precision, product", [("high", "native"), ("medium", "torch")])
def test_a_pass_has_own_products_unless_operands_are_rounded(precision, product, calls, monkeypatch):
    """On a CPU "high" rounds nothing."""
    monkeypatch.setattr(gemm, "matmul_precision", lambda _: precision)
    plan = backends.select(build_cell("ln_lstm", 4, 5).request(torch.randn(3, 2, 4)))
    assert (plan.backend, plan.gemm) == ("native", product)


def test_a_plan_decides_for_a_projection(calls):
    """A pass hands its choice to the products of its input."""
    x, w = torch.randn(10, 20), torch.randn(20, 40)
    affine(x, w, gemm="torch")
    assert not calls
    affine(x, w, gemm="native")
    assert len(calls) == 1


@needs_build
def test_small_products_and_few_rows_are_torchs(monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    choose(monkeypatch, "native")
    calls = []
    monkeypatch.setattr(native, "matmul", lambda *args: calls.append(args))

    def runs(M, K, N, transposed=False):
        calls.clear()
        w = torch.zeros(N, K).t() if transposed else torch.zeros(K, N)
        gemm.mm(torch.zeros(M, K), w, gemm="native")
        return bool(calls)

    assert runs(8, 256, 256) and not runs(7, 256, 1024) and not runs(8, 255, 256)
    assert runs(32, 256, 256, True) and not runs(31, 256, 256, True)


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel", None])
@pytest.mark.parametrize("compiled, capability", [(True, "AVX512"), (False, "AVX512"), (True, "AVX2")])
def test_the_processor_decides_and_the_log_says_so(
    vendor, compiled, capability, monkeypatch, tmp_path, caplog
):
    """MKL is slow on processors with AVX-512 that are not Intel's."""
    file = tmp_path / "cpuinfo"
    if vendor is not None:
        file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: of: this\n\n" * 2)
    monkeypatch.setattr(gemm, "CPUINFO", file)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(gemm, "mkl_is_slow", gemm.mkl_is_slow.__wrapped__)
    monkeypatch.setattr(native, "multiplies", lambda: compiled)
    gemm.preferred.cache_clear()
    own = vendor == "AuthenticAMD" and compiled and capability == "AVX512"
    with caplog.at_level(logging.INFO):
        assert gemm.preferred(None) == gemm.preferred(None) == ("native" if own else "torch")
    assert len(caplog.messages) == own


def test_unknown_words_and_missing_builds_are_refused(monkeypatch):
    monkeypatch.setenv("RHHN_MATMUL", "mkl")
    with pytest.raises(UsageError, match="RHHN_MATMUL=mkl is unknown, choose from native, torch"):
        gemm.check_policy()
    monkeypatch.setattr(native, "multiplies", lambda: False)
    monkeypatch.setenv("RHHN_MATMUL", "native")
    with pytest.raises(UsageError, match="RHHN_MATMUL=native needs the compiled kernels"):
        gemm.check_policy()
