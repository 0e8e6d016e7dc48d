"""Whole-sequence programs against the loop over ``step``, for every implementation of the point-wise part.

tests/test_cells.py holds every backend to the numpy transcriptions, to finite differences and, in float32, to
the float64 reference; here is what only whole sequences can get wrong.
"""

import logging
import subprocess
import sys

import pytest
import torch

from rhhn_fairseq import kernels
from rhhn_fairseq.cells import CELLS, build_cell
from rhhn_fairseq.cells.base import reorder_state
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.kernels import (
    aten,
    backends,
    energy,
    gated,
    highway,
    hyper_gated,
    native,
    pointwise,
    products,
)

GATED_NOISE = dict(
    recurrent_dropout=0.3, gal_dropout=0.2, zoneout=0.1, zoneout_c=0.2, h_detach=0.5, c_detach=0.5
)
RHN_NOISE = dict(recurrent_dropout=0.3, gal_dropout=0.2, zoneout=0.1, h_detach=0.5)
SIZES = {
    "lstm": {},
    "ln_lstm": {},
    "hyperlstm": dict(hyper_size=3, hyper_embed_size=2),
    "ln_hyperlstm": dict(hyper_size=3, hyper_embed_size=2),
    "rhn": dict(rhn_depth=3),
    "hyperrhn": dict(hyper_size=3, rhn_depth=3),
}
"""The cells that have a program of their own."""

fused_cells = pytest.mark.parametrize("name", SIZES)
implementations = pytest.mark.parametrize("implementation", list(pointwise.IMPLEMENTATIONS))


@pytest.fixture(autouse=True)
def built(request):
    """Without the compiled library its tests are skipped, with the reason."""
    params = getattr(request.node, "callspec", None)
    if params and params.params.get("implementation") == "native" and native.library() is None:
        pytest.skip("the compiled point-wise kernels are not built")


def _cell(name, options=(), C=4, H=5, dtype=torch.float64):
    torch.manual_seed(0)
    cell = build_cell(name, C, H, **SIZES[name] | dict(options)).to(dtype)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return cell


def _noise_options(name):
    return RHN_NOISE if "rhn" in name else GATED_NOISE


def _pass(cell, x, state, mask, noise, backend, monkeypatch):
    """Outputs, final state and all gradients of a weighted sum of the outputs and the final state."""
    monkeypatch.setenv("RHHN_KERNEL", backend)
    x = x.clone().requires_grad_()
    state = None if state is None else tuple(part.clone().requires_grad_() for part in state)
    y, final = cell(x, state, mask, noise)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    loss = (y * weights).sum() + sum((part * part).sum() for part in final)
    inputs = [x, *(state or ()), *cell.parameters()]
    return [y.detach(), *(part.detach() for part in final), *torch.autograd.grad(loss, inputs)]


def _assert_equal(found, exact, tolerance):
    for one, other in zip(found, exact, strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).norm() <= tolerance * (1 + other.norm())


@fused_cells
@implementations
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("noisy", [False, True], ids=["plain", "noisy"])
def test_equals_the_loop(name, implementation, padded, noisy, monkeypatch):
    cell = _cell(name, _noise_options(name) if noisy else ())
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
        exact = _pass(cell, x, state, mask, noise, "reference", monkeypatch)
        found = _pass(cell, x, state, mask, noise, implementation, monkeypatch)
        # Measured: below 7e-15.
        for one, other in zip(found, exact, strict=True):
            one, other = one.nan_to_num(), other.nan_to_num()
            assert (one - other).norm() <= 1e-13 * (1 + other.norm())


@pytest.mark.parametrize("name", ["rhn", "hyperrhn"])
@implementations
@pytest.mark.parametrize("depth", [1, 3])
def test_first_step_skip_equals_the_loop(name, implementation, depth, monkeypatch):
    cell = _cell(name, dict(first_step="skip", rhn_depth=depth))
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[:2, 1] = False
    exact = _pass(cell, x, None, mask, None, "reference", monkeypatch)
    _assert_equal(_pass(cell, x, None, mask, None, implementation, monkeypatch), exact, 1e-13)


@pytest.mark.parametrize("name", ["ln_lstm", "ln_hyperlstm"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_gates_normalised_one_by_one_equal_the_loop(name, padded, monkeypatch):
    """As torch's operations do it on the CPU where gates are large."""
    monkeypatch.setattr(aten._GatedStep, "LARGE", 0)
    calls = []
    normalise = aten._normalise
    monkeypatch.setattr(aten, "_normalise", lambda x, *rest: calls.append(x.dim()) or normalise(x, *rest))
    cell = _cell(name, GATED_NOISE)
    T, B = 7, 3
    noise, x = cell.sample_noise(T, B), torch.randn(T, B, 4, dtype=torch.float64)
    mask = torch.rand(T, B) > 0.3 if padded else None
    exact = _pass(cell, x, None, mask, noise, "reference", monkeypatch)
    _assert_equal(_pass(cell, x, None, mask, noise, "aten", monkeypatch), exact, 1e-13)
    assert calls and set(calls) == {2}


@implementations
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("rows", [1, 6, 9])
def test_hypervectors_in_parts_equal_the_loop(implementation, padded, rows, monkeypatch):
    """As on the CPU where those of a whole sequence are too many to stay near the processor."""
    monkeypatch.setattr(highway._Scaling, "NEAR", 0)
    monkeypatch.setattr(highway._Scaling, "ROWS", rows)
    cell = _cell("hyperrhn", RHN_NOISE)
    T, B = 7, 3
    noise, x = cell.sample_noise(T, B), torch.randn(T, B, 4, dtype=torch.float64)
    mask = torch.rand(T, B) > 0.3 if padded else None
    exact = _pass(cell, x, None, mask, noise, "reference", monkeypatch)
    made = []
    monkeypatch.setattr(
        torch, "bmm", lambda *args, _bmm=torch.bmm, **kw: made.append(args[0].shape) or _bmm(*args, **kw)
    )
    _assert_equal(_pass(cell, x, None, mask, noise, implementation, monkeypatch), exact, 1e-13)
    # z forward, and backward the gradient of what it was made from, part by part.
    steps = {1: 7 * [1], 6: [2, 2, 2, 1], 9: [3, 3, 1]}[rows]
    assert made == [(3, part * B, 3) for part in steps] + [(3, part * B, 5) for part in reversed(steps)]


@pytest.mark.parametrize("name", ["hyperlstm", "ln_hyperlstm"])
@implementations
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("rows, parts", [(1, 7), (6, 3), (9, 2), (11, 1)])
def test_backward_in_parts_equals_the_loop(name, implementation, padded, rows, parts, monkeypatch):
    """As where the gradients of a whole sequence's products would take much memory."""
    monkeypatch.setattr(products, "PART_ROWS", rows)
    handed = []
    hand = hyper_gated.hand_gradients
    monkeypatch.setattr(
        hyper_gated, "hand_gradients", lambda *buffers: handed.append(len(buffers[1].h)) or hand(*buffers)
    )
    cell = _cell(name, dict(hyper_state="previous") | GATED_NOISE if rows == 6 else GATED_NOISE)
    T, B = 7, 3
    noise, x = cell.sample_noise(T, B), torch.randn(T, B, 4, dtype=torch.float64)
    mask = torch.rand(T, B) > 0.3 if padded else None
    state = tuple(torch.randn(B, size, dtype=torch.float64) for size in cell.state_sizes)
    exact = _pass(cell, x, state, mask, noise, "reference", monkeypatch)
    _assert_equal(_pass(cell, x, state, mask, noise, implementation, monkeypatch), exact, 1e-13)
    # Either network, for all parts but the last steps'.
    assert len(handed) == 2 * (parts - 1)


@pytest.mark.parametrize("name", ["rhn", "hyperrhn"])
@implementations
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("rows, parts", [(1, 7), (6, 3), (9, 2), (11, 1)])
def test_backward_of_highways_in_parts(name, implementation, padded, rows, parts, monkeypatch):
    monkeypatch.setattr(products, "PART_ROWS", rows)
    monkeypatch.setattr(native, "NEAR", 0)
    added = []
    add = highway._add_weight_gradients
    monkeypatch.setattr(
        highway, "_add_weight_gradients", lambda *arguments: added.append(arguments[1]) or add(*arguments)
    )
    cell = _cell(name, RHN_NOISE)
    T, B = 7, 3
    noise, x = cell.sample_noise(T, B), torch.randn(T, B, 4, dtype=torch.float64)
    mask = torch.rand(T, B) > 0.3 if padded else None
    state = tuple(torch.randn(B, size, dtype=torch.float64) for size in cell.state_sizes)
    exact = _pass(cell, x, state, mask, noise, "reference", monkeypatch)
    _assert_equal(_pass(cell, x, state, mask, noise, implementation, monkeypatch), exact, 1e-13)
    # Of either network, from the last part on.
    steps = {1: 1, 6: 3, 9: 4, 11: 7}[rows]
    own = list(reversed(range(0, T, steps)))
    assert len(own) == parts and added == (2 * own if name == "hyperrhn" else own)


def test_parts_are_for_long_sequences_of_one_type():
    assert products.part_steps(100, 128, torch.float32, torch.float32) == 13
    assert products.part_steps(50, 128, torch.float32, torch.float32) == 13
    assert products.part_steps(20, 128, torch.float32, torch.float32) == 20
    assert products.part_steps(100, 128, torch.bfloat16, torch.float32) == 100
    assert products.part_steps(1, 10**6, torch.float32, torch.float32) == 1


@pytest.mark.parametrize("name", ["hyperlstm", "ln_hyperlstm"])
@implementations
def test_embeddings_from_the_previous_state_equal_the_loop(name, implementation, monkeypatch):
    cell = _cell(name, dict(hyper_state="previous"))
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    exact = _pass(cell, x, None, None, None, "reference", monkeypatch)
    _assert_equal(_pass(cell, x, None, None, None, implementation, monkeypatch), exact, 1e-13)


@fused_cells
@implementations
@pytest.mark.parametrize("T, B, H", [(1, 1, 1), (1, 2, 17), (64, 3, 33), (3, 65, 129)])
def test_odd_shapes_in_float32(name, implementation, T, B, H, monkeypatch):
    small = {"hyper_size": 1} if H == 1 and "hyper" in name else {}
    oracle, single = _cell(name, small, 4, H), _cell(name, small, 4, H).float()
    x = torch.randn(T, B, 4)
    exact = _pass(oracle, x.double(), None, None, None, "reference", monkeypatch)
    plain = _pass(single, x, None, None, None, "reference", monkeypatch)
    found = _pass(single, x, None, None, None, implementation, monkeypatch)
    for one, other, truth in zip(found, plain, exact, strict=True):
        own, error = (other - truth).norm(), (one - truth).norm()
        # The order of summation differs, so the errors do, but not their magnitude.
        assert error <= 4 * own + 1e-6 * (1 + truth.norm())


@fused_cells
@implementations
def test_bfloat16_errs_no_more_than_the_loop(name, implementation, monkeypatch):
    T, B, H = 20, 8, 64
    # Normalising three units, as the other tests' hypernetworks would, multiplies every rounding.
    wide = {"hyper_size": 32} if "hyper" in name else {}
    # Parameters that bfloat16 holds exactly, so that rounding them is no error.
    half = _cell(name, wide, 16, H, torch.float32).bfloat16()
    oracle = build_cell(name, 16, H, **SIZES[name] | wide).double()
    oracle.load_state_dict({key: value.double() for key, value in half.state_dict().items()})
    torch.manual_seed(1)
    x = torch.randn(T, B, 16).bfloat16()
    exact = _pass(oracle, x.double(), None, None, None, "reference", monkeypatch)
    errors = {}
    for backend in ("reference", implementation):
        parts = _pass(half, x, None, None, None, backend, monkeypatch)
        pairs = zip(parts, exact, strict=True)
        errors[backend] = [((part.double() - truth).norm() / truth.norm()).item() for part, truth in pairs]
    assert parts[0].dtype == torch.bfloat16
    # States and sums are float32 here and bfloat16 in the loop. Measured: 0.25 to 0.44 times its worst error.
    assert max(errors[implementation]) <= 0.7 * max(errors["reference"])
    assert max(errors[implementation]) < 0.05


@fused_cells
@implementations
def test_same_result_in_every_run_and_on_more_threads(name, implementation, monkeypatch):
    # Large enough that the rows are shared between threads.
    cell = _cell(name, (), 8, 160, torch.float32)
    x = torch.randn(4, 64, 8)
    one = _pass(cell, x, None, None, None, implementation, monkeypatch)
    again = _pass(cell, x, None, None, None, implementation, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    monkeypatch.setattr(pointwise.torch, "get_num_threads", lambda: 3)
    _assert_equal(_pass(cell, x, None, None, None, implementation, monkeypatch), one, 1e-5)


@fused_cells
@implementations
def test_token_by_token_with_a_reordered_beam(name, implementation, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", implementation)
    cell = _cell(name).eval()
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
    cell = _cell(name, (), 4, 33, torch.float32)
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
@implementations
def test_gradients_accumulate_and_the_graph_can_be_kept(name, implementation, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", implementation)
    cell = _cell(name)
    x = torch.randn(3, 2, 4, dtype=torch.float64)
    loss = cell(x)[0].square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in cell.parameters()]
    loss.backward()
    for parameter, gradient in zip(cell.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


@fused_cells
def test_autocast_keeps_to_the_type_of_the_projection(name, monkeypatch):
    cell = _cell(name, (), 16, 32, torch.float32)
    x = torch.randn(5, 3, 16)
    exact, _ = cell(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = cell(x)
    y.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in cell.parameters())
    # Eight bits of mantissa.
    torch.testing.assert_close(y.float(), exact, rtol=0, atol=0.05)


def _samples(name, monkeypatch, needs_gradient=True):
    """The arguments with which a cell's pass calls its operations, by operation."""
    calls = {}

    def spy(module, attribute):
        operation = getattr(module, attribute)

        def record(*args):
            calls[operation] = args
            return operation(*args)

        monkeypatch.setattr(module, attribute, record)

    for module in (gated, hyper_gated, highway):
        for attribute in ("lstm", "hyper_lstm", "highway"):
            if hasattr(module, attribute):
                spy(module, attribute)
                spy(module, f"{attribute}_backward")
    monkeypatch.setenv("RHHN_KERNEL", "aten")
    cell = _cell(name, _noise_options(name))
    T, B = 3, 2
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    x = torch.randn(T, B, 4, dtype=torch.float64, requires_grad=True)
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


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("forget_bias", [0.0, 1.5])
def test_torch_nn_equals_the_loop(name, forget_bias, monkeypatch):
    options = {"forget_bias": forget_bias} if name == "lstm" else {}
    torch.manual_seed(0)
    cell = build_cell(name, 4, 5, **options).double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    state = tuple(torch.randn(3, size, dtype=torch.float64) for size in cell.state_sizes)
    for start in (None, state):
        exact = _pass(cell, x, start, None, None, "reference", monkeypatch)
        _assert_equal(_pass(cell, x, start, None, None, "torch_nn", monkeypatch), exact, 1e-13)


@pytest.mark.parametrize(
    "name, options, padded, why",
    [
        ("ln_lstm", {}, False, "no layer normalisation"),
        ("rhn", {}, False, "has LSTM and GRU only"),
        ("lstm", {"recurrent_dropout": 0.1}, False, "no update"),
        ("lstm", {"zoneout": 0.1}, False, "no zoneout"),
        ("gru", {}, True, "no padding masks"),
    ],
)
def test_torch_nn_says_what_it_cannot_do(name, options, padded, why, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "torch_nn")
    cell = build_cell(name, 4, 5, **options)
    mask = torch.tensor([[True, False], [True, True]]) if padded else None
    with pytest.raises(UsageError, match=f"RHHN_KERNEL=torch_nn: .* cannot run there, .*{why}"):
        cell(torch.randn(2, 2, 4), mask_TB=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_plain_cells_go_to_cudnn_on_a_gpu(name, monkeypatch, caplog):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    monkeypatch.setattr(kernels, "_told", set())
    cell = build_cell(name, 4, 5).cuda()
    with caplog.at_level(logging.INFO, logger="rhhn_fairseq.kernels"):
        cell(torch.randn(2, 2, 4, device="cuda"))
    assert "torch_nn backend" in caplog.text


def test_the_compiled_kernels_are_built():
    # Installation leaves them out where it must; then everything else runs on, but here it should not be so.
    assert native.library() is not None, "install a C++ compiler and run scripts/install.sh again"


def test_the_preferred_backend_is_the_compiled_one_and_is_named_once(monkeypatch, caplog):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    monkeypatch.setattr(kernels, "_told", set())
    cell = _cell("rhn", (), dtype=torch.float32)
    with caplog.at_level(logging.INFO, logger="rhhn_fairseq.kernels"):
        cell(torch.randn(2, 2, 4))
        cell(torch.randn(2, 2, 4))
    assert [record.message for record in caplog.records] == [
        "RHN runs on the native backend (cpu, torch.float32)"
    ]
    assert backends(cell) == ("native", "aten", "reference")
    monkeypatch.setattr(native, "library", lambda: None)
    assert backends(cell) == ("aten", "reference")


@pytest.mark.parametrize(
    "T, B, graph, forced, loop",
    [
        (1, kernels.STEP_ROWS, False, None, True),
        (1, kernels.STEP_ROWS + 1, False, None, False),
        (2, 1, False, None, False),
        (1, 1, True, None, False),
        (1, 1, False, "native", False),
    ],
)
def test_single_steps_of_few_rows_run_as_the_loop(T, B, graph, forced, loop, monkeypatch):
    monkeypatch.setattr(kernels, "_told", set())
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    if forced:
        monkeypatch.setenv("RHHN_KERNEL", forced)
    cell = _cell("ln_lstm", ()).eval()
    runs = []
    monkeypatch.setattr(kernels.reference, "scan", lambda *args: runs.append(args) or (None, None))
    with torch.set_grad_enabled(graph):
        cell(torch.randn(T, B, 4, dtype=torch.float64))
    assert bool(runs) == loop


def test_float16_runs_as_the_loop():
    assert backends(_cell("lstm"), dtype=torch.float16) == ("reference",)


def test_cells_without_a_program_say_what_they_run_on(monkeypatch):
    without = [name for name in CELLS if name not in SIZES]
    assert "mlstm" in without
    monkeypatch.setenv("RHHN_KERNEL", "native")
    cell = build_cell("mlstm", 4, 5)
    with pytest.raises(UsageError, match="RHHN_KERNEL=native: .* runs on reference only"):
        cell(torch.randn(2, 2, 4))


def test_a_derived_cell_keeps_its_own_step(monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)

    class Silent(type(build_cell("lstm", 4, 5))):
        def step(self, g_t, state, noise_t):
            h, c = state
            return torch.zeros_like(h), (h, c)

    y, _ = Silent(_cell("lstm").config)(torch.randn(3, 2, 4))
    assert not y.any()


def test_cells_know_nothing_of_fairseq_with_their_kernels():
    code = (
        "import sys, torch\n"
        "from rhhn_fairseq.cells import build_cell\n"
        "build_cell('hyperlstm', 4, 5, hyper_size=3)(torch.zeros(2, 1, 4))\n"
        "sys.exit('fairseq' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _energies(q, k, v, mask):
    hidden = torch.tanh(q.unsqueeze(2) + k.unsqueeze(1))
    return (hidden @ v).masked_fill(~mask.unsqueeze(1), float("-inf"))


@pytest.mark.parametrize("N, R, S, A", [(1, 1, 1, 1), (3, 7, 5, 17), (2, 1, 9, 64), (5, 3, 4, 129)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_energies_equal_torchs_operations(N, R, S, A, dtype, monkeypatch):
    if native.library() is None:
        pytest.skip("the compiled point-wise kernels are not built")
    torch.manual_seed(0)
    parts = [torch.randn(N, R, A), 2 * torch.randn(N, S, A), torch.randn(A)]
    parts = [part.to(dtype).requires_grad_() for part in parts]
    exact_parts = [part.detach().double().requires_grad_() for part in parts]
    mask = torch.rand(N, S) > 0.3
    mask[:, 0] = True
    weights = torch.randn(N, R, S, dtype=torch.float64)

    def run(function, q, k, v):
        # Through a softmax, as padding has to leave no trace in the gradients either.
        chances = function(q, k, v, mask).softmax(dim=-1)
        loss = (chances * weights.to(chances.dtype)).sum()
        return [chances, *torch.autograd.grad(loss, [q, k, v])]

    exact = run(_energies, *exact_parts)
    found = run(energy.energies, *parts)
    assert found[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # Measured: 1e-15, 4e-7 and, for gradients stored in bfloat16, 4e-3.
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 1e-2}[dtype]
    _assert_equal([part.double() for part in found], exact, tolerance)
    monkeypatch.setattr(native, "library", lambda: None)
    if dtype != torch.bfloat16:
        _assert_equal([part.double() for part in run(energy.energies, *parts)], exact, tolerance)


def test_energy_operations_keep_torchs_rules():
    if native.library() is None:
        pytest.skip("the compiled point-wise kernels are not built")
    q, k, v = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (2, 4, 5), (5,))
    )
    mask = torch.ones(2, 4, dtype=torch.bool)
    rules = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(energy.energy, (q, k, v, mask), test_utils=rules)
    de = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.library.opcheck(energy.energy_backward, (de, q, k, v, mask), test_utils=rules)
    assert torch.autograd.gradcheck(lambda *parts: energy.energies(*parts, mask), (q, k, v))
