"""Which backend runs a cell: the choice, what is said of it, and torch.nn's own layers."""

import ctypes
import logging

import pytest
import torch
from helpers.cli import python
from helpers.fused_cells import SIZES, assert_equal, backends, make_cell, run_pass
from helpers.graph_imitation import imitated_graphs

from rhhn_fairseq.cells import CELLS, build_cell, cell_options, running
from rhhn_fairseq.cells.selection import explain
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends as table
from rhhn_fairseq.ops import native, policy
from rhhn_fairseq.ops.backends import torch_nn
from rhhn_fairseq.ops.native import build


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
        exact = run_pass(cell, x, start, None, None, "reference", monkeypatch)
        assert_equal(run_pass(cell, x, start, None, None, "torch_nn", monkeypatch), exact, 1e-13)
    # A step of decoding has a function of its own.
    with torch.no_grad():
        y, final = cell(x[:1], state)
        monkeypatch.setenv("RHHN_KERNEL", "reference")
        exact, exact_final = cell(x[:1], state)
    assert_equal([y, *final], [exact, *exact_final], 1e-13)


@pytest.mark.parametrize(
    "name, options, padded, why",
    [
        ("ln_lstm", {}, False, "no layer normalisation"),
        ("lstm", {"zoneout": 0.1}, False, "no zoneout"),
        ("lstm", {}, True, "no padding masks"),
    ],
)
def test_torch_nn_says_what_it_cannot_do(name, options, padded, why, monkeypatch):
    monkeypatch.setenv("RHHN_KERNEL", "torch_nn")
    cell = build_cell(name, 4, 5, **options)
    mask = torch.tensor([[True, False], [True, True]]) if padded else None
    with pytest.raises(UsageError, match=f"RHHN_KERNEL=torch_nn: .* runs on .* only; .*{why}"):
        cell(torch.randn(2, 2, 4), mask_TB=mask)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_plain_narrow_cells_go_to_torch_nn_on_a_cpu(name, monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    monkeypatch.setattr(table, "NARROW", 8)
    ran = []
    run = torch_nn.run
    monkeypatch.setattr(torch_nn, "run", lambda *args: ran.append(1) or run(*args))

    def runs(hidden=8, dtype=torch.float32, mask=None, **options):
        ran.clear()
        table._select.cache_clear()
        build_cell(name, 4, hidden, **options).to(dtype)(torch.randn(3, 2, 4, dtype=dtype), None, mask)
        return bool(ran)

    assert runs() and not runs(9)
    # A GRU's padding moves behind its real positions.
    assert runs(mask=torch.ones(3, 2, dtype=torch.bool)) == (name == "gru")
    assert not runs(recurrent_dropout=0.1)
    # Its states are of the operands' type, and it rounds no operands where that is asked for.
    assert not runs(dtype=torch.bfloat16) and not runs(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not runs()
    monkeypatch.setattr(table.gemm, "matmul_precision", lambda device: "medium")
    assert not runs()
    monkeypatch.setenv("RHHN_KERNEL", "reference")
    assert not runs()


def test_the_compiled_kernels_are_built():
    # Installation leaves them out where it must; then everything else runs on, but here it should not be so.
    assert native.library() is not None, "install a C++ compiler and run scripts/install.sh again"


def test_the_preferred_backend_is_the_compiled_one_and_is_named_once(monkeypatch, caplog):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    cell = make_cell("rhn", (), dtype=torch.float32)
    with caplog.at_level(logging.INFO, logger="rhhn_fairseq.ops"):
        cell(torch.randn(2, 2, 4))
        cell(torch.randn(2, 2, 4))
    said = [record.message for record in caplog.records if record.name.endswith("backends")]
    assert said == ["RHN runs on the native backend (cpu, torch.float32)"]
    assert backends(cell) == ("native", "aten", "reference")
    monkeypatch.setattr(native, "library", lambda: None)
    table._select.cache_clear()
    assert backends(cell) == ("aten", "reference")


@pytest.mark.parametrize("cell, records", [("rhn", True), ("mingru", False), ("elman", False)])
def test_only_loops_of_operations_are_recorded(cell, records, monkeypatch, caplog):
    """A scan has no loop, so sequences must not be padded to the lengths of graphs."""
    monkeypatch.setenv(policy.CUDA_GRAPHS, "1")
    imitated_graphs(monkeypatch)
    request = build_cell(cell, 4, 5).request(torch.ones(3, 2, 4))
    table._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="rhhn_fairseq.ops"):
        assert table.select(request).records == records
    assert caplog.messages[-1].endswith(", as CUDA graphs") == records


@pytest.mark.parametrize(
    "T, B, graph, forced, loop",
    [
        (1, table.STEP_ROWS, False, None, True),
        (1, table.STEP_ROWS + 1, False, None, False),
        (2, 1, False, None, False),
        (1, 1, True, None, True),
        (1, 1, False, "native", False),
    ],
)
def test_single_steps_of_few_rows_run_as_the_loop(T, B, graph, forced, loop, monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    if forced:
        monkeypatch.setenv("RHHN_KERNEL", forced)
    cell = make_cell("ln_lstm", ()).eval()
    runs = []
    monkeypatch.setattr(running, "scan", lambda *args: runs.append(args) or ((x,), args[2]))
    x = torch.randn(T, B, 4, dtype=torch.float64)
    with torch.set_grad_enabled(graph):
        cell(x)
    assert bool(runs) == loop


def test_types_that_have_fused_operations(monkeypatch):
    cell = make_cell("lstm")
    assert backends(cell, dtype=torch.bfloat16) == ("native", "aten", "reference")
    # CPUs multiply bfloat16; half precision of this kind is a GPU's.
    assert backends(cell, dtype=torch.float16) == ("aten", "reference")
    assert backends(cell, dtype=torch.int8) == ("reference",)


@pytest.mark.parametrize(
    ("operation", "device", "dtype", "forced", "reason"),
    [
        ("lstm", "cpu", torch.float32, "nativ", "backend nativ is unknown, choose from native, torch_nn"),
        ("linear_scan", "cpu", torch.float32, "native", "backend native has no operation for this cell"),
        ("lstm", "cpu", torch.float16, "native", "backend native has no kernels for float16"),
        ("lstm", "cuda", torch.float32, "native", "backend native does not compile for cuda"),
    ],
)
def test_compiled_passes_refuse_a_backend_that_cannot_run_them(operation, device, dtype, forced, reason):
    with pytest.raises(UsageError, match=reason):
        table.select_traced(operation, torch.device(device), dtype, forced)


def test_a_derived_cell_keeps_its_own_step(monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)

    class Silent(type(build_cell("lstm", 4, 5))):
        def step(self, g_t, state, noise_t):
            h, c = state
            return torch.zeros_like(h), (h, c)

    y, _ = Silent(make_cell("lstm").config)(torch.randn(3, 2, 4))
    assert not y.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("name", SIZES)
def test_autocast_on_a_gpu(name, backend, dtype, monkeypatch):
    """torch casts other operations there than on a CPU."""
    monkeypatch.setenv("RHHN_KERNEL", backend)
    cell = make_cell(name, (), 16, 32, torch.float32).cuda()
    x = torch.randn(5, 3, 16, device="cuda")
    exact, _ = cell(x)
    with torch.autocast("cuda", dtype=dtype):
        y, _ = cell(x)
    torch.testing.assert_close(y.float(), exact, rtol=0, atol=0.05)
    y.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in cell.parameters())


def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.undo()
    code = (
        "import os\n"
        "for name in [name for name in os.environ if name.startswith('RHHN_')]:\n"
        "    del os.environ[name]\n"
        "from rhhn_fairseq.ops import policy\n"
        "before = policy.current()\n"
        "os.environ['RHHN_KERNEL'] = 'reference'\n"
        "assert policy.current() is before and before.kernel is None\n"
        "with policy.using(kernel='aten'):\n"
        "    assert policy.current().kernel == 'aten'\n"
        "assert policy.current() is before\n"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr


def test_a_cell_may_have_a_backend_of_its_own(monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    cell = make_cell("rhn", (), dtype=torch.float32)
    calls = []
    monkeypatch.setattr(cell, "run_fused", lambda *args: calls.append(args) or (x, None))
    x = torch.randn(2, 2, 4)
    cell(x)
    assert len(calls) == 1
    cell.backend = "reference"
    y, _ = cell(x)
    assert len(calls) == 1 and y.shape == (2, 2, 5)
    # A backend that ran before, and is not named in the log again, is the last one all the same.
    for name in ("aten", "reference", "aten"):
        cell.backend = name
        cell(x)
        assert table.RUNNING["RHN"] == name
    cell.backend = "nonsense"
    with pytest.raises(UsageError, match="RHN.backend=nonsense is unknown, choose from native, torch_nn, "):
        cell(x)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("T, B, grad", [(50, 16, True), (1, 4, False), (1, 64, False)])
def test_every_backend_is_explained_and_the_marked_one_runs(name, T, B, grad, monkeypatch):
    monkeypatch.delenv("RHHN_KERNEL", raising=False)
    small = {"hyper_size": 3} if "hyper_size" in cell_options(name) else {}
    cell = build_cell(name, 4, 5, **SIZES.get(name, small)).eval()
    with torch.set_grad_enabled(grad):
        rows = explain(cell, T, B)
        plan = table.select(cell.request(torch.randn(T, B, 4), cell.zero_state(B, dtype=torch.float32)))
    assert [backend for backend, _, _ in rows] == list(table.NAMES)
    assert [backend for backend, runs, _ in rows if runs] == [plan.backend]
    assert all(reason and "\n" not in reason for _, _, reason in rows)


def test_what_runs_on_a_gpu_does_not_depend_on_autocast_on_the_cpu():
    cell = build_cell("ln_lstm", 4, 5)
    expected = explain(cell, 5, 2, "cuda")
    with torch.autocast("cpu", dtype=torch.float16):
        assert explain(cell, 5, 2, "cuda") == expected


def test_a_build_that_cannot_be_loaded_says_what_to_do(tmp_path):
    path = tmp_path / "_any.so"
    path.touch()
    with pytest.raises(ImportError, match=r"_any\.so cannot be loaded .*; install the package again"):
        build.load(path)


def test_structures_of_another_build_are_refused(monkeypatch):
    path = next(build.Path(build.__file__).parent.glob("_any*"))

    class Longer(build.GatedStruct):
        _fields_ = [("more", ctypes.c_int64)]

    monkeypatch.setitem(build.STRUCTURES, "gated", Longer)
    with pytest.raises(ImportError, match="struct gated differs; install the package again"):
        build.load(path)
