"""The Triton point-wise kernels: results in the interpreter, code for GPUs, and where they are offered.

What they compute is checked by triton_cases.py. It runs in a process of its own, because TRITON_INTERPRET=1
counts only if it is set before anything imports triton, and would then hold for every other test.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.fused_cells import backends

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.ops import backends as table
from rhhn_fairseq.ops import triton as implementation
from rhhn_fairseq.ops.backends import pointwise

CASES = Path(__file__).with_name("triton_cases.py")
MISSING = implementation.missing()
installed = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def run_cases(environment, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES), *options]
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


# Each family of cells with noise and padding, kernels of steps with rows and columns left over, and kernels
# of sequences with several programs and an odd width; the smallest and largest sizes run with --slow.
QUICK = "noisy-padded and not 1-1-1 and not 1-3-128 or odd_shapes and (2-3-17 or 2-9-129)"


@installed
def test_everything_at_once_in_the_interpreter():
    run_cases({"TRITON_INTERPRET": "1"}, "-k", QUICK)


@installed
@pytest.mark.slow
def test_every_case_in_the_interpreter():
    run_cases({"TRITON_INTERPRET": "1"})


@installed
@pytest.mark.gpu
def test_every_case_on_the_gpu():
    # Nearly each of them compiles kernels of its own, which takes the time.
    several = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    run_cases({}, *several)


class Recorder:
    """Stands for a kernel and keeps the arguments of its calls instead of launching it."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda **arguments: self.calls.append((self.kernel, arguments))


def _launches(name, dtype, monkeypatch, T=2):
    """What a cell's passes over T steps, plain, and noisy and padded, would launch."""
    from rhhn_fairseq.ops.triton import gated_step, highway_step

    calls = []
    for module in (gated_step, highway_step):
        for direction in ("forward", "backward"):
            monkeypatch.setattr(module, direction, Recorder(getattr(module, direction), calls))
    monkeypatch.setattr(implementation, "obstacle", lambda device: None)
    table._select.cache_clear()
    monkeypatch.setenv("RHHN_KERNEL", "triton")
    noise = dict(recurrent_dropout=0.3, zoneout=0.1)
    sizes = dict(rhn_depth=2) if "rhn" in name else dict(zoneout_c=0.2, c_detach=0.5)
    for options in ({}, noise | sizes):
        hyper = dict(hyper_size=3) if "hyper" in name else {}
        hyper |= dict(hyper_embed_size=16) if "hyperlstm" in name else {}
        cell = build_cell(name, 4, 17, **hyper, **options).to(dtype)
        x = torch.randn(T, 3, 4, dtype=dtype, requires_grad=True)
        mask = torch.ones(T, 3, dtype=torch.bool) if options else None
        y, _ = cell(x, None, mask, cell.sample_noise(T, 3) if options else None)
        y.sum().backward()
    return calls


@installed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ln_lstm", "ln_hyperlstm", "rhn", "hyperrhn"])
def test_other_lengths_compile_nothing_new(name, dtype, monkeypatch):
    found = []
    for T in (2, 5):
        with monkeypatch.context() as patch:
            calls = _launches(name, dtype, patch, T)
        constants = (
            tuple((p.name, a[p.name]) for p in kernel.params if p.is_constexpr or a[p.name] is None)
            for kernel, a in calls
        )
        found.append({(id(kernel), own) for (kernel, _), own in zip(calls, constants, strict=True)})
    assert found[0] == found[1]


@installed
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="triton interprets in this process")
@pytest.mark.parametrize(
    "name, dtype, capability",
    [
        pytest.param("lstm", torch.float32, 90, id="lstm"),
        pytest.param("lstm", torch.float64, 80, id="lstm_float64", marks=pytest.mark.slow),
        pytest.param("ln_lstm", torch.bfloat16, 90, id="ln_lstm_bfloat16", marks=pytest.mark.slow),
        pytest.param("ln_hyperlstm", torch.bfloat16, 80, id="ln_hyperlstm_bfloat16"),
        pytest.param("ln_hyperlstm", torch.float64, 90, id="ln_hyperlstm_float64", marks=pytest.mark.slow),
        pytest.param("hyperrhn", torch.bfloat16, 90, id="hyperrhn_bfloat16", marks=pytest.mark.slow),
        pytest.param("hyperrhn", torch.float64, 80, id="hyperrhn_float64", marks=pytest.mark.slow),
        pytest.param("ln_hyperlstm", torch.float16, 90, id="ln_hyperlstm_float16", marks=pytest.mark.slow),
        pytest.param("hyperrhn", torch.float16, 80, id="hyperrhn_float16", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_to_machine_code(name, dtype, capability, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = {}
    for kernel, arguments in _launches(name, dtype, monkeypatch):
        # The interpreter takes whatever it gets; a launch takes nothing else.
        assert arguments.keys() - {"num_warps", "num_stages"} == {p.name for p in kernel.params}
        values = {parameter: arguments[parameter.name] for parameter in kernel.params}
        constants = {p.name: v for p, v in values.items() if p.is_constexpr or v is None}
        signature = {
            p.name: "constexpr" if p.name in constants else mangle_type(v) for p, v in values.items()
        }
        key = (kernel, *signature.items(), *constants.items())
        if key not in compiled:
            source = ASTSource(kernel, signature, constants)
            options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
            compiled[key] = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            if dtype == torch.float64:
                _assert_exact({p.name: v for p, v in values.items()}, constants, compiled[key].asm["ttir"])
    # Plain and noisy, forward and backward, at least.
    assert len(compiled) >= 4
    assert all(code.asm["cubin"] for code in compiled.values())


def _assert_exact(values, constants, code):
    """That no number of a pass has been rounded to float32 on its way into the code."""
    written = re.findall(r"arith\.constant (?:dense<)?(-?\d+\.\d+(?:[eE][-+]?\d+)?)", code)
    for name, value in values.items():
        if isinstance(value, float):
            # Triton takes every number that is not a constant as float32.
            assert name in constants, name
            close = {number for number in map(float, written) if _float32(number) == _float32(value)}
            assert close <= {value}, name


def _float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def test_a_rounded_number_is_noticed():
    exact = "arith.constant dense<1.000000e-05> : tensor<4xf64>"
    rounded = "arith.constant 9.9999997473787516E-6 : f64"
    _assert_exact({"EPSILON": 1e-5}, {"EPSILON": 1e-5}, exact)
    for constants, code in (({"EPSILON": 1e-5}, rounded), ({}, exact)):
        with pytest.raises(AssertionError, match="EPSILON"):
            _assert_exact({"EPSILON": 1e-5}, constants, code)


def test_on_the_cpu_it_is_offered_to_the_interpreter_only(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("RHHN_KERNEL", "triton")
    cell = build_cell("lstm", 4, 5)
    assert "triton" not in backends(cell)
    with pytest.raises(UsageError, match="RHHN_KERNEL=triton: LSTM runs on .*reference only; .*CUDA devices"):
        cell(torch.randn(2, 2, 4))


@installed
@pytest.mark.parametrize(
    "dtype, preferred",
    [
        (torch.float32, "triton"),
        (torch.bfloat16, "triton"),
        (torch.float16, "aten"),
        (torch.float64, "aten"),
    ],
)
def test_on_a_gpu_it_is_preferred_in_the_types_that_were_measured(dtype, preferred):
    cell = build_cell("lstm", 4, 5)
    request = cell.request(torch.ones(2, 1, 4))
    request = request._replace(device=torch.device("cuda"), dtype=dtype, extras=("gal",))
    assert table._select(request)[0] == preferred
    assert backends(cell, "cuda", dtype) == ("triton", "aten", "reference")


@installed
def test_old_gpus_have_no_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = implementation.obstacle(torch.device("cuda"))
    assert reason == "triton needs a GPU of compute capability 8.0 or newer, found 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert implementation.obstacle(torch.device("cuda")) is None


@installed
def test_without_a_compiler_there_is_no_triton(monkeypatch):
    """Triton compiles what starts a kernel on the machine that runs it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(implementation.shutil, "which", lambda name: None)
    for variable, starts in (("", False), ("/opt/cc", True)):
        implementation._has_compiler.cache_clear()
        monkeypatch.setenv("CC", variable)
        reason = implementation.obstacle(torch.device("cuda"))
        assert reason is None if starts else reason.startswith("triton needs a C compiler")
    implementation._has_compiler.cache_clear()


def test_without_the_package_that_is_said(monkeypatch):
    monkeypatch.setattr(implementation.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("RHHN_KERNEL", "triton")
    cell = build_cell("lstm", 4, 5)
    assert backends(cell, "cuda") == ("aten", "reference")
    with pytest.raises(UsageError, match="RHHN_KERNEL=triton: .*pip install triton"):
        cell(torch.randn(2, 2, 4))


@installed
def test_too_old_a_version_is_named(monkeypatch):
    monkeypatch.setattr(implementation, "_version", lambda: "3.3.1+git")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("RHHN_KERNEL", "triton")
    with pytest.raises(UsageError, match=r"RHHN_KERNEL=triton: .*must be 3.4 or newer, found 3.3.1\+git"):
        build_cell("lstm", 4, 5)(torch.randn(2, 2, 4))


@pytest.mark.parametrize(
    "B, H, rows, cols", [(1, 1, 1, 1), (3, 5, 4, 8), (128, 1000, 1, 1024), (9, 129, 4, 256)]
)
def test_every_row_belongs_to_one_program(B, H, rows, cols):
    tile = implementation.Tile.of(B, H)
    assert (tile.rows, tile.cols) == (rows, cols)
    assert tile.rows * (tile.blocks - 1) < B <= tile.rows * tile.blocks


def test_sums_have_a_slot_for_every_program():
    state = torch.zeros(9, 129)
    assert pointwise.gradient_sums(table.make_plan("triton"), [14 * 129], state).shape == (3, 14 * 129)
    assert pointwise.gradient_sums(table.make_plan("triton"), [12, 2, 129], state).shape == (1, 12, 2, 129)


@installed
def test_buffers_that_are_not_rows_are_refused():
    from rhhn_fairseq.ops.lstm import GatedMasks, GatedNumbers, make_buffers

    h, c = torch.zeros(3, 2, 5), torch.zeros(3, 5, 2).transpose(1, 2)
    u = torch.zeros(3, 2, 20)
    buffers = make_buffers((u, h, c), (h[0], c[0]), [], GatedMasks(), GatedNumbers(1.0))
    with pytest.raises(ValueError, match="c of strides"):
        implementation.gated(buffers, None)
