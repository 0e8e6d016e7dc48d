"""Fused operations against the loop over ``step``, for every implementation of the point-wise part.

tests/cells/test_cells.py holds every backend to the numpy transcriptions, to finite differences and, in
float32, to the float64 reference; here is what only whole sequences can get wrong.

test_triton.py runs this file once more, in a process with RHHN_TEST_TRITON=1: Triton's kernels, on a GPU or,
with TRITON_INTERPRET=1, in Triton's interpreter.
"""

import contextlib
import os

import pytest
import torch
from helpers.fused_cells import SIZES, assert_equal, cell_name, make_cell, noise_options, run_pass
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rhhn_fairseq.cells import build_cell, cell_options, running
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends, lstm, native, sequence
from rhhn_fairseq.ops.highway import products
from rhhn_fairseq.ops.hyper_lstm import passes
from rhhn_fairseq.ops.loop import reorder_state

fused_cells = pytest.mark.parametrize("name", SIZES)
WITH_TRITON = os.environ.get("RHHN_TEST_TRITON") == "1"
ON_GPU = WITH_TRITON and os.environ.get("TRITON_INTERPRET") != "1"
implementations = pytest.mark.parametrize("implementation", ["triton"] if WITH_TRITON else ["native", "aten"])


@pytest.fixture(autouse=True)
def device(request):
    """Tensors are those of the tested device; without the compiled library its tests are skipped."""
    params = getattr(request.node, "callspec", None)
    if params and params.params.get("implementation") == "native" and native.library() is None:
        pytest.skip("the compiled point-wise kernels are not built")
    with torch.device("cuda") if ON_GPU else contextlib.nullcontext():
        yield


@fused_cells
@implementations
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noisy"])
def test_equals_the_loop(name, implementation, padded, noisy, monkeypatch):
    cell = make_cell(name, noise_options(name) if noisy else ())
    T, B = 7, 3
    x, mask = torch.randn(T, B, 4, dtype=torch.float64), None
    state = tuple(torch.randn(B, size, dtype=torch.float64) for size in cell.state_sizes)
    if padded:
        # Holes in the middle as well, and nothing that a product could hide: padding holds NaN.
        mask = torch.rand(T, B) > 0.3
        x[~mask] = float("nan")
        assert not mask.all() and mask.any()
    for noise in (cell.sample_noise(T, B), None):
        cell.train(noise is not None)
        exact = run_pass(cell, x, state, mask, noise, "reference", monkeypatch)
        found = run_pass(cell, x, state, mask, noise, implementation, monkeypatch)
        # Measured: below 7e-15.
        for one, other in zip(found, exact, strict=True):
            one, other = one.nan_to_num(), other.nan_to_num()
            assert (one - other).norm() <= 1e-13 * (1 + other.norm())


@fused_cells
@implementations
@pytest.mark.parametrize("shared", ["steps", "sequences", "both"])
def test_noise_for_all_steps_or_sequences_equals_the_loop(name, implementation, shared, monkeypatch):
    """Noise of [T or 1, B or 1, ·], as a caller may give it."""
    cell = make_cell(name, noise_options(name))
    T, B = 5, 3
    x, noise = torch.randn(T, B, 4, dtype=torch.float64), cell.sample_noise(T, B)
    rows = slice(None) if shared == "sequences" else slice(1)
    columns = slice(None) if shared == "steps" else slice(1)
    noise = {key: part[rows, columns].clone() for key, part in noise.items()}
    exact = run_pass(cell, x, None, None, noise, "reference", monkeypatch)
    assert_equal(run_pass(cell, x, None, None, noise, implementation, monkeypatch), exact, 1e-13)


@fused_cells
@implementations
def test_noise_that_does_not_fit_is_refused(name, implementation, monkeypatch):
    cell = make_cell(name, noise_options(name))
    x, noise = torch.randn(5, 3, 4, dtype=torch.float64), cell.sample_noise(5, 3)
    monkeypatch.setenv("RHHN_KERNEL", implementation)
    for key, part in noise.items():
        # The hypernetwork of a HyperRHN has a part of the noise under its own name.
        of = f"noise '{key.removeprefix('hyper_')}' has shape"
        for wrong in (part[..., :-1], torch.cat([part, part], -1)):
            with pytest.raises(UsageError, match=f"{of} .* this operation reads"):
                cell(x, noise=noise | {key: wrong})
        for wrong in (part.expand(5, 3, -1)[:4], part.expand(5, 3, -1)[:, :2], part[0]):
            with pytest.raises(UsageError, match=f"noise '{key}' has shape .* expected .5 or 1, 3 or 1, .]"):
                cell(x, noise=noise | {key: wrong})


OPTIONS = [
    ("rhn", dict(first_step="skip", rhn_depth=1)),
    ("hyperrhn", dict(first_step="skip", rhn_depth=3)),
    *((name, dict(hyper_state="previous")) for name in SIZES if "hyperlstm" in name),
    ("ln_hyperlstm", dict(recurrent_dropout=0.5, recurrent_mask="sequence")),
]


@pytest.mark.parametrize("name, options", OPTIONS)
@implementations
def test_further_options_equal_the_loop(name, options, implementation, monkeypatch):
    cell = make_cell(name, options)
    x, noise = torch.randn(6, 3, 4, dtype=torch.float64), cell.sample_noise(6, 3)
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[:2, 1] = False
    exact = run_pass(cell, x, None, mask, noise, "reference", monkeypatch)
    assert_equal(run_pass(cell, x, None, mask, noise, implementation, monkeypatch), exact, 1e-13)


@pytest.mark.parametrize("name", [name for name in SIZES if "hyper" in name or name == "rhn"])
@implementations
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("rows, blocks", [(1, 7), (6, 3), (9, 2), (11, 1)])
def test_backward_in_parts_equals_the_loop(name, implementation, padded, rows, blocks, monkeypatch):
    """As where the gradients of a whole sequence's products would take much memory."""
    monkeypatch.setattr(sequence, "BLOCK_ROWS", rows)
    monkeypatch.setattr(backends.Plan, "fits_one_call", lambda *_: False)
    if implementation == "triton":
        # Gradients of scaling vectors in groups of steps.
        monkeypatch.setattr("rhhn_fairseq.ops.triton.steps.KEPT_STEPS", 2)
    # Recording a graph calls them twice, replaying it not at all.
    monkeypatch.setenv("RHHN_CUDA_GRAPHS", "0")
    calls = []

    def count(module, function):
        called = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args: calls.append(function) or called(*args))

    # Of HyperLSTMs for every part and either network, and once for z; of highways for every part.
    count(passes, "weight_gradient")
    count(products.Products, "end_block")
    before = dict(hyper_state="previous") if "lstm" in name and rows == 6 else {}
    cell = make_cell(name, noise_options(name) | before)
    T, B = 7, 3
    noise, x = cell.sample_noise(T, B), torch.randn(T, B, 4, dtype=torch.float64)
    mask = torch.rand(T, B) > 0.3 if padded else None
    state = tuple(torch.randn(B, size, dtype=torch.float64) for size in cell.state_sizes)
    exact = run_pass(cell, x, state, mask, noise, "reference", monkeypatch)
    assert_equal(run_pass(cell, x, state, mask, noise, implementation, monkeypatch), exact, 1e-13)
    # Rank-scaled products add up their own.
    parts = {"rhn": blocks, "hyperrhn": 2 * blocks, "hyperrhn, rank 3": blocks, "rolled_hyperrhn": 2 * blocks}
    assert len(calls) == parts.get(name, 2 * blocks + 1)


@fused_cells
@implementations
@pytest.mark.parametrize("T, B, H", [(1, 1, 1), (20, 3, 17), (2, 9, 129)])
def test_odd_shapes_in_float32(name, implementation, T, B, H, monkeypatch):
    small = {"hyper_size": 1} if H == 1 and "hyper" in name else {}
    oracle, single = make_cell(name, small, 4, H), make_cell(name, small, 4, H).float()
    x = torch.randn(T, B, 4)
    exact = run_pass(oracle, x.double(), None, None, None, "reference", monkeypatch)
    plain = run_pass(single, x, None, None, None, "reference", monkeypatch)
    found = run_pass(single, x, None, None, None, implementation, monkeypatch)
    for one, other, truth in zip(found, plain, exact, strict=True):
        own, error = (other - truth).norm(), (one - truth).norm()
        # The order of summation differs, so the errors do, but not their magnitude. The gradient of one
        # normalised unit is zero, for which an H200 computed 1.1e-6.
        floor = 4e-6 if H == 1 and name.startswith("ln_") else 1e-6
        assert error <= 4 * own + floor * (1 + truth.norm())


HALVES = [("native", torch.bfloat16), ("aten", torch.bfloat16), ("aten", torch.float16)]
if WITH_TRITON:
    HALVES = [("triton", torch.bfloat16), ("triton", torch.float16)]


@fused_cells
@pytest.mark.parametrize("implementation, dtype", HALVES, ids=lambda value: str(value).removeprefix("torch."))
def test_half_precision_errs_less_than_the_loop(name, implementation, dtype, monkeypatch):
    T, B, H = 20, 8, 64
    # Normalising three units, as the other tests' hypernetworks would, multiplies every rounding.
    wide = {"hyper_size": 32} if "hyper" in name else {}
    # Parameters that the type holds exactly, so that rounding them is no error.
    half = make_cell(name, wide, 16, H, torch.float32).to(dtype)
    oracle = build_cell(cell_name(name), 16, H, **SIZES[name] | wide).double()
    oracle.load_state_dict({key: value.double() for key, value in half.state_dict().items()})
    torch.manual_seed(1)
    x = torch.randn(T, B, 16).to(dtype)
    exact = run_pass(oracle, x.double(), None, None, None, "reference", monkeypatch)
    errors = {}
    for backend in ("reference", implementation):
        parts = run_pass(half, x, None, None, None, backend, monkeypatch)
        pairs = zip(parts, exact, strict=True)
        errors[backend] = [((part.double() - truth).norm() / truth.norm()).item() for part, truth in pairs]
    assert parts[0].dtype == dtype
    # States and sums are float32 here, not so in the loop. Measured: 0.18 to 0.63 times its worst error.
    assert max(errors[implementation]) <= 0.7 * max(errors["reference"])
    assert max(errors[implementation]) < 0.05


@fused_cells
@implementations
def test_same_result_in_every_run_and_on_more_threads(name, implementation, monkeypatch):
    # Large enough that the rows are shared between threads.
    cell = make_cell(name, (), 8, 160, torch.float32)
    x = torch.randn(2, 64, 8)
    one = run_pass(cell, x, None, None, None, implementation, monkeypatch)
    again = run_pass(cell, x, None, None, None, implementation, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert_equal(run_pass(cell, x, None, None, None, implementation, monkeypatch), one, 1e-5)


@fused_cells
@implementations
def test_token_by_token_with_a_reordered_beam(name, implementation, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", implementation)
    cell = make_cell(name).eval()
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        _, state = cell(x[:2])
        state = reorder_state(state, order)
        found = []
        for t in (2, 3):
            y, state = cell(x[t : t + 1], state)
            found.append(y)
        whole, _ = cell(torch.cat([x[:2, order], x[2:]]))
    torch.testing.assert_close(torch.cat(found), whole[2:], rtol=0, atol=1e-13)


@fused_cells
@implementations
def test_extreme_sums_stay_finite_and_nan_passes_through(name, implementation, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", implementation)
    cell = make_cell(name, (), 4, 33, torch.float32)
    x = torch.randn(3, 2, 4) * 1e4
    x.requires_grad_()
    y, _ = cell(x)
    y.sum().backward()
    assert torch.isfinite(y).all() and y.abs().max() <= 1.0001
    assert torch.isfinite(x.grad).all()
    broken = torch.randn(3, 2, 4)
    broken[1, 0] = float("nan")
    y, _ = cell(broken)
    assert y[1:, 0].isnan().all() and torch.isfinite(y[:, 1]).all() and torch.isfinite(y[0]).all()


@fused_cells
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", ["plain", "noisy", "skip"])
def test_autocast_keeps_to_the_type_of_the_projection(name, dtype, options, monkeypatch):
    if options == "skip" and "first_step" not in cell_options(cell_name(name)):
        pytest.skip("the cell has no option first_step")
    monkeypatch.setattr(running, "scan", None)
    chosen = {"plain": {}, "noisy": noise_options(name), "skip": dict(first_step="skip")}[options]
    cell = make_cell(name, chosen, 16, 32, torch.float32)
    x, noise = torch.randn(5, 3, 16), cell.sample_noise(5, 3)
    exact, _ = cell(x, noise=noise)
    with torch.autocast("cpu", dtype=dtype):
        y, _ = cell(x, noise=noise)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in cell.parameters())
    # Measured: up to 0.0098 and 0.0010.
    tolerance = {torch.bfloat16: 0.02, torch.float16: 0.0025}[dtype]
    torch.testing.assert_close(y.float(), exact, rtol=0, atol=tolerance)


def _samples(name, monkeypatch):
    """The arguments with which a cell's pass calls its operations, by operation."""
    calls = {}

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation.namespace == "rhhn":
                calls[operation] = tree_map_only(torch.Tensor, with_gradient, args)
            return operation(*args, **(kwargs or {}))

    def with_gradient(tensor):
        return tensor.detach().clone().requires_grad_(tensor.is_floating_point())

    monkeypatch.setenv("RHHN_KERNEL", "aten")
    cell = make_cell(name, noise_options(name))
    T, B = 3, 2
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    x = torch.randn(T, B, 4, dtype=torch.float64, requires_grad=True)
    with Record():
        y, final = cell(x, None, mask, cell.sample_noise(T, B))
        (y.sum() + sum(part.sum() for part in final)).backward()
    return calls


@fused_cells
def test_operations_keep_torchs_rules(name, monkeypatch):
    calls = _samples(name, monkeypatch)
    assert len(calls) >= 2
    for operation, args in calls.items():
        rules = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(operation, args, test_utils=rules)


@fused_cells
@implementations
def test_parameters_may_lie_apart(name, implementation, monkeypatch):
    cell, x = make_cell(name), torch.randn(5, 3, 4, dtype=torch.float64)
    exact = run_pass(cell, x, None, None, None, implementation, monkeypatch)
    for parameter in cell.parameters():
        apart = parameter.detach().unsqueeze(-1).repeat_interleave(2, dim=-1)[..., 0]
        assert parameter.numel() == 1 or not apart.is_contiguous()
        parameter.data = apart
    assert_equal(run_pass(cell, x, None, None, None, implementation, monkeypatch), exact, 1e-13)


@pytest.mark.skipif(not native.multiplies(), reason="needs the compiled kernels and AVX2")
def test_a_single_row_may_have_any_stride():
    H, plans = 8, [backends.make_plan(name) for name in ("aten", "native")]
    g = torch.randn(1, 3, 4 * H, dtype=torch.float64).transpose(0, 1)
    assert g.is_contiguous() and g.stride(1) != 4 * H
    state = (torch.zeros(1, H, dtype=torch.float64),) * 2
    weight = torch.randn(H, 4 * H, dtype=torch.float64)
    expected, found = (
        lstm.lstm(g, state, weight, [], sequence.Masks(), lstm.GatedNumbers(1.0), plan)[0] for plan in plans
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


@pytest.mark.skipif(native.library() is None, reason="needs the compiled kernels")
def test_tensors_that_are_not_in_host_memory_are_refused():
    # No rows, so that nothing would be read.
    q, mask, elsewhere = torch.zeros(0, 3, 5), torch.zeros(0, 4, dtype=torch.bool), torch.device("meta")
    operands = dict(q=q, k=torch.zeros(0, 4, 5, device=elsewhere), v=torch.zeros(5), mask=mask)
    with pytest.raises(ValueError, match=r"^k of strides .* on meta cannot be given to C\+\+"):
        native.energy(operands)
    with pytest.raises(ValueError, match=r"^c of strides .* on meta cannot be given to C\+\+"):
        native.lstm_gates(torch.zeros(0, 20), torch.zeros(0, 5, device=elsewhere), 1.0)
