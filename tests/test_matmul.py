"""Products of float32 matrices by compiled code, against float64, and where they are used."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import EPSILON, assert_product, choose, draw_matrix, forced_products, with_every_build

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.kernels import aten, matmul, native, pointwise
from rhhn_fairseq.layers.output_loss import linear_cross_entropy
from rhhn_fairseq.layers.product import affine

CLOSE = dict(rtol=1e-6, atol=12 * 20 * EPSILON)

needs_build = pytest.mark.skipif(not native.multiplies(), reason="needs the compiled kernels and AVX2")
needs_onednn = pytest.mark.skipif(not matmul._has_onednn(), reason="needs a torch with oneDNN")


@pytest.fixture(autouse=True)
def decided_anew():
    """What the processor or a test decided is forgotten."""
    yield
    matmul.chosen.cache_clear()
    matmul.mkl_is_slow.cache_clear()


@pytest.fixture
def ours(monkeypatch):
    yield from forced_products(monkeypatch, "native")


@pytest.fixture
def onednn(monkeypatch):
    yield from forced_products(monkeypatch, "onednn")


@pytest.fixture(
    params=[pytest.param("native", marks=needs_build), pytest.param("onednn", marks=needs_onednn)]
)
def others(request, monkeypatch):
    """Products that are not torch's: the list of calls."""
    yield from forced_products(monkeypatch, request.param)


def _product(x, w, add, laid, skipped=0):
    """By ``native``, into rows that lie apart, of which nothing else may be written."""
    whole = torch.full((x.shape[0], w.shape[1] + 2 * skipped), float("nan"))
    out = whole[:, skipped : skipped + w.shape[1]]
    if laid:
        native.Panels(w).product(x, out, add)
    else:
        native.matmul(x, w, out, add)
    assert whole.isnan().sum() == 2 * skipped * len(x)
    return out


@settings(max_examples=80, deadline=None)
@given(
    M=st.integers(1, 40),
    K=st.integers(1, 70),
    N=st.integers(1, 130),
    x_transposed=st.booleans(),
    w_transposed=st.booleans(),
    laid=st.booleans(),
    added=st.sampled_from(["nothing", "row", "rows"]),
    skipped=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_every_build_multiplies(M, K, N, x_transposed, w_transposed, laid, added, skipped, seed):
    draw = torch.Generator().manual_seed(seed)
    x, w = draw_matrix(M, K, x_transposed, skipped, draw), draw_matrix(K, N, w_transposed, skipped, draw)
    add = {
        "nothing": None,
        "row": torch.randn(N, generator=draw),
        "rows": draw_matrix(M, N, False, skipped, draw),
    }
    for _ in with_every_build():
        assert_product(x, w, add[added], _product(x, w, add[added], laid, skipped))


# More than is laid out at a time of rows, of numbers of a row and of columns; few columns and many rows;
# panels that threads have to share; and one of the widths for which even plain rows are laid out.
LARGE = [
    (1100, 70, 90),
    (20, 3300, 60),
    (9, 40, 2600),
    (700, 1600, 20),
    (64, 1537, 49),
    (700, 40, 1300),
    (50, 70, 512),
]


@needs_build
@pytest.mark.parametrize("M, K, N", LARGE)
@pytest.mark.parametrize("transposed", ["", "x", "w", "xw"])
def test_parts_and_threads_give_the_same_bits(M, K, N, transposed):
    draw = torch.Generator().manual_seed(0)
    x, w = draw_matrix(M, K, "x" in transposed, 0, draw), draw_matrix(K, N, "w" in transposed, 0, draw)
    add = torch.randn(N, generator=draw)
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results += [_product(x, w, add, laid) for laid in (False, True)]
    finally:
        torch.set_num_threads(threads)
    assert_product(x, w, add, results[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


@settings(max_examples=30, deadline=None)
@given(
    L=st.integers(1, 4),
    M=st.integers(1, 20),
    K=st.integers(1, 20),
    N=st.sampled_from([1, 16, 50, 96, 256]),
    transposed=st.sampled_from(["", "x", "w", "xw"]),
    laid=st.booleans(),
    added=st.sampled_from(["nothing", "row", "stack", "out"]),
    seed=st.integers(0, 99),
)
def test_every_build_multiplies_stacks(L, M, K, N, transposed, laid, added, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.stack([draw_matrix(M, K, False, 0, draw) for _ in range(L)], dim=1).transpose(0, 1)
    if "x" in transposed:
        x = torch.randn(L, K, M, generator=draw).transpose(1, 2)
    w = torch.randn(L, N, K, generator=draw).transpose(1, 2)
    if "w" not in transposed:
        w = w.contiguous()
    row, stack = torch.randn(N, generator=draw), torch.randn(L, M, N, generator=draw)
    for _ in with_every_build():
        out = stack.clone()
        add = {"nothing": None, "row": row, "stack": stack, "out": out}[added]
        if laid:
            native.Panels(w).product(x, out, add)
        else:
            native.matmul(x, w, out, add)
        for i in range(L):
            of_one = {"nothing": None, "row": row}.get(added, stack[i])
            assert_product(x[i], w[i], of_one, out[i])


@needs_build
@pytest.mark.parametrize("laid", [False, True])
def test_what_is_added_may_be_the_result_and_nan_stays_in_its_row(laid):
    x, w, out = torch.randn(10, 20), torch.randn(20, 50), torch.randn(10, 50)
    x[1, 4], w[7, 9] = float("nan"), float("inf")
    exact = out + x @ w
    if laid:
        native.Panels(w).product(x, out, out)
    else:
        native.matmul(x, w, out, out)
    torch.testing.assert_close(out, exact, equal_nan=True)
    assert out[1].isnan().all() and out[:, 9].isinf().sum() == 9


@needs_build
@pytest.mark.parametrize("why", ["inner", "rows", "columns", "add", "type", "strides", "stack"])
def test_what_does_not_fit_is_refused(why):
    x, w, out, add = torch.ones(4, 5), torch.ones(5, 6), torch.zeros(4, 6), torch.ones(6)
    if why == "inner":
        w = torch.ones(4, 6)
    if why in ("rows", "columns"):
        out = torch.zeros(3, 6) if why == "rows" else torch.zeros(4, 7)
    if why == "add":
        add = torch.ones(5)
    if why == "type":
        out = out.double()
    if why == "strides":
        out = torch.zeros(6, 4).t()
    if why == "stack":
        out = torch.zeros(1, 4, 6)
    with pytest.raises(ValueError, match=r"\(4, 5\) by .* cannot be written to"):
        native.matmul(x, w, out, add)


@pytest.mark.parametrize(
    "shape, added",
    [((7, 9), "nothing"), ((7, 9), "row"), ((7, 9), "rows"), ((3, 4, 9), "row"), ((3, 4, 9), "nothing")],
)
def test_affine_has_its_gradients(shape, added, others):
    x, w = torch.randn(*shape), torch.randn(9, 11)
    add = {"nothing": None, "row": torch.randn(11), "rows": torch.randn(7, 11)}[added]
    parts = [part.requires_grad_() for part in (x, w, add) if part is not None]
    doubles = [part.detach().double().requires_grad_() for part in parts]
    found, exact = affine(*parts), affine(*doubles)
    assert len(others) == 1
    # Sums of at most twelve products below 20.
    torch.testing.assert_close(found.double(), exact, **CLOSE)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), parts)
    assert len(others) == 3
    for one, other in zip(gradients, torch.autograd.grad((exact * weights).sum(), doubles), strict=True):
        torch.testing.assert_close(one.double(), other, **CLOSE)


def test_it_can_be_differentiated_twice(others):
    x, w = torch.randn(7, 9, requires_grad=True), torch.randn(9, 11, requires_grad=True)

    def penalty(x, w):
        (gradient,) = torch.autograd.grad(affine(x, w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, w])

    found = penalty(x, w)
    assert len(others) > 3
    exact = penalty(*(part.detach().double().requires_grad_() for part in (x, w)))
    for one, other in zip(found, exact, strict=True):
        # Three products of float32 after one another; measured: below 5e-7.
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_it_is_an_operation_as_torch_wants_them(others):
    x, w = torch.randn(7, 9, requires_grad=True), torch.randn(11, 9).t().requires_grad_()
    for add in (None, torch.randn(11, requires_grad=True), torch.randn(7, 11)):
        torch.library.opcheck(matmul._matmul, (x, w, add))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_loss_has_the_same_gradients(dtype, others, monkeypatch):
    y, weight, bias = torch.randn(30, 8), torch.randn(20, 8), torch.randn(20)
    target, real = torch.randint(20, (30,)), torch.rand(30) > 0.2

    def run():
        parts = [part.detach().to(dtype).requires_grad_() for part in (y, weight, bias)]
        loss, *_ = linear_cross_entropy(*parts, target, real, smoothing=0.1, chunk=16)
        return torch.autograd.grad(loss, parts)

    found = run()
    assert bool(others) == (dtype == torch.float32)
    choose(monkeypatch, "torch")
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other)


REASONS = "double bfloat16 medium autocast compile kernel triton choice"


@pytest.mark.parametrize("why", REASONS.split())
def test_it_leaves_the_rest_alone(why, others, monkeypatch):
    x, w, backend = torch.randn(10, 20), torch.randn(20, 40), None
    if why in ("double", "bfloat16"):
        x, w = (part.to(getattr(torch, why)) for part in (x, w))
    if why == "kernel":
        monkeypatch.setenv("RHHN_KERNEL", "reference")
    if why == "triton":
        backend = "triton"
    if why == "compile":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if why == "choice":
        choose(monkeypatch, "torch")
    precision = torch.get_float32_matmul_precision()
    try:
        if why == "medium":
            torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
            matmul.mm(x, w, backend=backend)
            matmul.Factor(w, 9, 10, backend).product(x, torch.empty(10, 40, dtype=x.dtype))
            if backend is None:
                assert affine(x, w).dtype == (torch.bfloat16 if why in ("autocast", "bfloat16") else x.dtype)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert not others


@needs_build
def test_small_products_and_few_rows_are_torchs(monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    choose(monkeypatch, "native")
    calls = []
    monkeypatch.setattr(native, "matmul", lambda *args: calls.append(args))

    def runs(M, K, N, transposed=False):
        calls.clear()
        matmul.mm(torch.zeros(M, K), torch.zeros(N, K).t() if transposed else torch.zeros(K, N))
        return bool(calls)

    assert runs(8, 256, 256) and not runs(7, 256, 1024) and not runs(8, 255, 256)
    assert runs(32, 256, 256, True) and not runs(31, 256, 256, True)


@needs_onednn
@pytest.mark.parametrize("x_stored", ["rows", "columns", "gaps"])
@pytest.mark.parametrize("w_stored", ["rows", "columns", "gaps"])
@pytest.mark.parametrize("added", ["nothing", "row", "rows", "out"])
def test_onednn_multiplies(x_stored, w_stored, added, onednn):
    draw = torch.Generator().manual_seed(0)
    M, K, N = 20, 30, 70
    x, w = (
        draw_matrix(*shape, stored == "columns", 3 * (stored == "gaps"), draw)
        for shape, stored in (((M, K), x_stored), ((K, N), w_stored))
    )
    out = torch.randn(M, N, generator=draw)
    add = {"nothing": None, "row": out[0].clone(), "rows": out.clone(), "out": out}[added]
    expected = None if add is None else add.clone()
    for backend in ("native", "aten"):
        assert_product(x, w, expected, matmul.mm(x, w, None, expected, backend))
        for transpose in (False, True):
            found = out.clone()
            add_to = found if added == "out" else add
            matmul.Factor(w.t() if transpose else w, 5, M, backend, transpose).product(x, found, add_to)
            assert_product(x, w, expected, found)
    assert len(onednn) == 6
    assert matmul.mm(x, w, out, add, "aten") is out
    assert_product(x, w, expected, out)


@needs_onednn
@pytest.mark.parametrize("kernel, large", [("native", False), ("aten", False), ("aten", True)])
@pytest.mark.parametrize("name", ["ln_hyperlstm", "hyperlstm", "rhn", "hyperrhn", "ln_lstm", "lstm"])
def test_sequences_with_products_of_onednn_equal_the_loop(name, kernel, large, onednn, monkeypatch):
    if kernel == "native" and native.library() is None:
        pytest.skip("needs the compiled kernels")
    monkeypatch.setattr(pointwise, "_in_one_call", lambda *_: False)
    tanhs = []
    if large:
        # Of large gates tanh is oneDNN's, too, where they fill its rows: here not those of a hypernetwork.
        by_onednn = aten._tanh_by_onednn
        monkeypatch.setattr(aten._GatedStep, "LARGE", 0)
        monkeypatch.setattr(aten, "_tanh_by_onednn", lambda x: tanhs.append(x.shape) or by_onednn(x))
    torch.manual_seed(0)
    cell = build_cell(name, 5, 48, **(dict(hyper_size=20) if "hyper" in name else {}))
    x = torch.randn(6, 9, 5)

    def run(cell, x):
        x = x.detach().requires_grad_()
        y, state = cell(x)
        loss = sum(part.square().sum() for part in (y, *state))
        return y, *torch.autograd.grad(loss, [x, *cell.parameters()])

    monkeypatch.setenv("RHHN_KERNEL", kernel)
    found = run(cell, x)
    assert len(onednn) > 2 * len(x)
    # Of the update and of c, forward and once more backward.
    assert tanhs == (4 * len(x) * [(9, 48)] if large and "lstm" in name else [])
    monkeypatch.setenv("RHHN_KERNEL", "reference")
    exact = run(cell.double(), x.double())
    # Measured: below 2e-6.
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= 1e-5 * (1 + other.norm())


@needs_onednn
def test_tanh_by_onednn_is_as_exact_as_torchs():
    numbers = torch.cat([torch.linspace(-100, 100, 4000), torch.logspace(-37, 1, 4000), torch.zeros(16)])
    exact = numbers.double().tanh()
    # Measured: 1e-7 times the number, torch's the same.
    assert bool(((aten._tanh_by_onednn(numbers) - exact).abs() <= 2 * EPSILON * exact.abs()).all())


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("shape", [(30, 21), (7, 1), (64, 14)])
def test_a_transpose_stored_by_rows(shape, large, monkeypatch):
    monkeypatch.setattr(matmul, "LARGE_TRANSPOSE", 1 if large else 10**6)
    monkeypatch.setattr(matmul, "COPIED_COLUMNS", 7)
    part = torch.randn(shape)
    assert matmul._by_rows(part) is part
    rows = matmul._by_rows(part.t())
    assert rows.is_contiguous() and torch.equal(rows, part.t())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("backend", ["native", "aten"])
def test_the_processor_decides_and_the_log_says_so(slow, compiled, backend, monkeypatch, caplog):
    monkeypatch.delenv(matmul.VARIABLE, raising=False)
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: slow)
    monkeypatch.setattr(matmul, "_has_onednn", lambda: True)
    monkeypatch.setattr(native, "multiplies", lambda: compiled)
    matmul.chosen.cache_clear()
    expected = "torch"
    if slow:
        expected = "native" if compiled and backend == "native" else "onednn"
    with caplog.at_level(logging.INFO):
        assert matmul.chosen(backend) == matmul.chosen(backend) == expected
    assert len(caplog.messages) == slow


def test_without_onednn_plain_torch_is_left(monkeypatch):
    monkeypatch.delenv(matmul.VARIABLE, raising=False)
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: True)
    monkeypatch.setattr(matmul, "_has_onednn", lambda: False)
    monkeypatch.setattr(native, "multiplies", lambda: True)
    matmul.chosen.cache_clear()
    assert matmul.chosen("aten") == "torch" and matmul.chosen("native") == "native"
    monkeypatch.setattr(native, "multiplies", lambda: False)
    matmul.chosen.cache_clear()
    assert matmul.chosen("native") == "torch"


@pytest.mark.parametrize("slow, expected", [(True, "onednn"), (False, "torch")])
def test_forced_compiled_products_are_not_those_of_aten(slow, expected, monkeypatch):
    """It is what runs without them, and has what it would have had."""
    monkeypatch.setattr(native, "multiplies", lambda: True)
    monkeypatch.setattr(matmul, "_has_onednn", lambda: True)
    monkeypatch.setattr(matmul, "mkl_is_slow", lambda: slow)
    choose(monkeypatch, "native")
    assert matmul.chosen("aten") == expected and matmul.chosen("native") == "native"


@pytest.mark.parametrize(
    "vendor, capability, slow",
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_processors_for_which_mkl_is_slow(vendor, capability, slow, monkeypatch, tmp_path):
    file = tmp_path / "cpuinfo"
    if vendor is not None:
        file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: of: this\n\n" * 2)
    monkeypatch.setattr(matmul, "CPUINFO", file)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    matmul.mkl_is_slow.cache_clear()
    assert matmul.mkl_is_slow() == slow


def test_other_words_are_refused(monkeypatch):
    monkeypatch.setenv(matmul.VARIABLE, "mkl")
    with pytest.raises(UsageError, match="RHHN_MATMUL=mkl is unknown, choose from native, onednn, torch"):
        matmul.forced()
    monkeypatch.setattr(native, "multiplies", lambda: False)
    monkeypatch.setattr(matmul, "_has_onednn", lambda: False)
    for word, needs in (("native", "the compiled kernels"), ("onednn", "a torch with oneDNN")):
        monkeypatch.setenv(matmul.VARIABLE, word)
        with pytest.raises(UsageError, match=f"RHHN_MATMUL={word} needs {needs}"):
            matmul.forced()
