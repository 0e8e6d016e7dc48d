"""Many steps in one compiled call, against the loop over ``step`` in float64."""

import functools
import itertools

import pytest
import torch
from helpers.fused_cells import GATED_NOISE, RHN_NOISE, doubled, run_pass
from helpers.products import forced_products

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.ops import backends, native, sequence

CELLS = {
    "lstm": ({}, GATED_NOISE),
    "ln_lstm": ({}, GATED_NOISE),
    "hyperlstm": (dict(hyper_embed_size=3, hyper_state="previous"), GATED_NOISE),
    "ln_hyperlstm": (dict(hyper_embed_size=2), GATED_NOISE),
    "rhn": (dict(rhn_depth=3), RHN_NOISE),
    "hyperrhn": (dict(rhn_depth=3), RHN_NOISE),
}
# Rows of a thread: none, one, less than a tile, several; columns: less than a panel, some, whole panels.
SHAPES = [(4, 1, 1), (9, 7, 33), (6, 29, 64), (5, 13, 130)]
C = 4

pytestmark = pytest.mark.skipif(not native.multiplies(), reason="needs the compiled kernels and AVX2")


@pytest.fixture(autouse=True)
def ran(monkeypatch):
    """The directions in which many steps ran in one call."""
    calls = []

    def count(module, name):
        function = getattr(module, name)

        def counted(*arguments):
            gradients = arguments[1] if name == "many_steps" else arguments[0][1]
            calls.append(native.direction_of(gradients))
            return function(*arguments)

        monkeypatch.setattr(module, name, counted)

    for name in ("many_steps", "hyper_lstm_sequence"):
        count(native, name)
    monkeypatch.setenv("RHHN_KERNEL", "native")
    return calls


@pytest.fixture
def compiled_products(monkeypatch):
    """Calls of compiled products that are not those of a whole sequence."""
    yield from forced_products(monkeypatch)


def _cell(name, noisy, H):
    torch.manual_seed(0)
    options, noise = CELLS[name]
    if "hyper" in name:
        options = options | dict(hyper_size=min(H, 20))
    cell = build_cell(name, C, H, **options, **(noise if noisy else {}))
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return cell.train(noisy)


def _pass(cell, x, state, mask, noise, backend="native"):
    with pytest.MonkeyPatch.context() as patch:
        return run_pass(cell, x, state, mask, noise, backend, patch)


def _assert_as_the_loop(results, cell, x, state, mask, noise):
    """That the results of a pass are those of the loop in float64."""
    exact = _pass(cell.double(), x.double(), doubled(state), mask, doubled(noise), "reference")
    # Measured: below 2e-6.
    for one, other in zip(results, exact, strict=True):
        one, other = one.nan_to_num().double(), other.nan_to_num()
        assert (one - other).norm() <= 1e-5 * (1 + other.norm())


def _inputs(cell, T, B, padded):
    x, mask = torch.randn(T, B, C), None
    state = tuple(torch.randn(B, size) for size in cell.state_sizes)
    if padded:
        mask = torch.rand(T, B) > 0.3
        x[~mask] = float("nan")
    return x, state, mask


def _noise(cell, T, B):
    """The cell's noise, and sequences that start anew."""
    return cell.sample_noise(T, B) | {"resets": torch.rand(T, B, 1) < 0.2}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("T, B, H", SHAPES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noisy"])
def test_equals_the_loop(name, T, B, H, padded, noisy, ran):
    cell = _cell(name, noisy, H)
    x, state, mask = _inputs(cell, T, B, padded)
    noise = _noise(cell, T, B) if noisy else None
    results = _pass(cell, x, state, mask, noise)
    # A HyperRHN's hypernetwork is a sequence of its own.
    each = 2 if name == "hyperrhn" else 1
    assert ran == each * ["forward"] + each * ["backward"]
    _assert_as_the_loop(results, cell, x, state, mask, noise)


@pytest.mark.parametrize("name", ["rhn", "hyperrhn"])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_highways_in_parts_equal_the_loop(name, rows, ran, monkeypatch):
    """As where gradients of products and hypervectors of all steps would be too many."""
    T, B = 7, 9
    monkeypatch.setattr(sequence, "BLOCK_ROWS", rows * B)
    parts, steps_of = [], native.many_steps

    def counted(buffers, gradients, *others):
        run = steps_of(buffers, gradients, *others)
        direction = native.direction_of(gradients)
        return functools.wraps(run)(lambda *steps: parts.append((direction, *steps)) or run(*steps))

    monkeypatch.setattr(native, "many_steps", counted)
    cell = _cell(name, True, 33)
    x, state, mask = _inputs(cell, T, B, True)
    noise = _noise(cell, T, B)
    results = _pass(cell, x, state, mask, noise)
    # A HyperRHN's main network is last forward and first backward.
    forward = [part[1:] for part in parts if part[0] == "forward"]
    backward = [part[1:] for part in parts if part[0] == "backward"]
    cuts = [*range(0, T, sequence.block_steps(T, B, torch.float32, torch.float32)), T]
    networks = 2 if name == "hyperrhn" else 1
    assert forward == networks * [(0, T)]
    assert backward == networks * list(itertools.pairwise(cuts))[::-1]
    _assert_as_the_loop(results, cell, x, state, mask, noise)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("T, B, H", [(1, 3, 9), (5, 40, 17)])
def test_steps_with_packed_matrices_equal_the_loop(name, T, B, H, compiled_products, monkeypatch):
    """The products of networks that are not small, by ``ops.matmul.gemm``."""
    monkeypatch.setattr(backends.Plan, "fits_one_call", lambda *_: False)
    cell = _cell(name, True, H)
    x, state, mask = _inputs(cell, T, B, True)
    noise = _noise(cell, T, B)
    results = _pass(cell, x, state, mask, noise)
    assert len(compiled_products) > 2 * T
    _assert_as_the_loop(results, cell, x, state, mask, noise)


@pytest.mark.parametrize("name", CELLS)
def test_repeats_bit_by_bit_on_any_number_of_threads(name):
    """But for sums over rows, which threads add up one after another."""
    cell = _cell(name, True, 33)
    x, state, mask = _inputs(cell, 6, 21, False)
    noise, threads = cell.sample_noise(6, 21), torch.get_num_threads()
    results = {}
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            first, second = (_pass(cell, x, state, mask, noise) for _ in range(2))
            assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
            results[count] = first
    finally:
        torch.set_num_threads(threads)
    for count in (2, 3):
        for one, other in zip(results[1], results[count], strict=True):
            assert (one - other).norm() <= 1e-5 * (1 + other.norm())


def test_runs_where_a_thread_has_the_matrices_in_its_cache(ran, monkeypatch):
    preferred, threads = "torch", 2
    monkeypatch.setattr(backends.gemm, "preferred", lambda _: preferred)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def runs(T=8, B=40, H=16, dtype=torch.float32, name="lstm", **options):
        ran.clear()
        with torch.no_grad():
            build_cell(name, C, H, **options).to(dtype)(torch.randn(T, B, C, dtype=dtype))
        # A HyperRHN's hypernetwork is smaller, and may run so by itself.
        return len(ran) == (2 if name == "hyperrhn" else 1)

    hyper = dict(name="hyperlstm", hyper_size=32, hyper_embed_size=4)
    highway, scaled = dict(name="rhn", rhn_depth=2), dict(name="hyperrhn", rhn_depth=2, hyper_size=8)
    assert runs() and runs(H=256) and runs(H=256, **highway) and runs(H=256, **scaled)
    assert not runs(H=257) and not runs(H=257, **highway) and not runs(H=257, **scaled)
    assert runs(H=128, **hyper) and not runs(H=256, **hyper) and not runs(H=128, T=3, **hyper)
    assert not runs(T=3)
    assert not runs(dtype=torch.float64) and not runs(dtype=torch.bfloat16)
    preferred = "native"
    assert runs(H=991, B=8) and runs(H=257, **hyper) and runs(H=991, **highway) and runs(H=991, **scaled)
    assert not runs(H=991, B=7) and not runs(H=992, B=64) and not runs(H=992, B=64, **highway)
    assert runs(B=1) and runs(B=1, T=4)
    threads = 4
    assert not runs(H=991, B=8) and runs(B=1)
    monkeypatch.setattr(native, "runs_sequences", lambda dtype: False)
    assert not runs()


def test_infinite_sums_saturate_and_nan_passes_through():
    cell = build_cell("lstm", C, 20)
    x = torch.zeros(5, 9, C)
    x[0, 3] = float("nan")
    x[0, 5] = 1e38
    y, _ = cell(x)
    rows = torch.arange(9)
    assert y[:, 3].isnan().all() and y[:, rows != 3].isfinite().all()
