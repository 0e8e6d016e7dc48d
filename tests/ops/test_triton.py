"""The Triton point-wise kernels: results in the interpreter, code for GPUs, and where they are offered.

What they compute is checked by test_operations.py, in a process of its own, because TRITON_INTERPRET=1 counts
only if it is set before anything imports triton, and would then hold for every other test.
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

CASES = Path(__file__).with_name("test_operations.py")
MISSING = implementation.missing()
installed = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def run_cases(environment, selection, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES), "-k", selection]
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    variables = kept | {"RHHN_TEST_TRITON": "1"} | environment
    run = subprocess.run([*command, *options], env=variables, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and "skipped" not in run.stdout


# The largest cell of either file of kernels with noise and padding, and kernels of several programs and an
# odd width; the others run with --slow.
PADDED = "equals_the_loop and noisy-padded and (ln_hyperlstm or hyperrhn)"
WIDE = "odd_shapes and 2-9-129 and (ln_lstm or hyperrhn)"
QUICK = f"triton and not rank and not rolled and ({PADDED} or {WIDE})"


@installed
def test_everything_at_once_in_the_interpreter():
    run_cases({"TRITON_INTERPRET": "1"}, QUICK)


@installed
@pytest.mark.slow
def test_every_case_in_the_interpreter():
    run_cases({"TRITON_INTERPRET": "1"}, "triton")


@installed
@pytest.mark.gpu
def test_every_case_on_the_gpu():
    # Nearly each of them compiles kernels of its own, which takes the time.
    run_cases({}, "triton", *(["-n", "8"] if importlib.util.find_spec("xdist") else []))


class Recorder:
    """Stands for a kernel and keeps the arguments of its calls instead of launching it."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda **arguments: self.calls.append((self.kernel, arguments))


def _launches(name, dtype, monkeypatch, T=2, noisy=(False, True)):
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
    for options in [noise | sizes if each else {} for each in noisy]:
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
    "name, dtype, capability, noisy",
    [
        ("lstm", torch.float32, 90, (False,)),
        # What noise and padding add to a kernel, beside everything else.
        ("ln_hyperlstm", torch.bfloat16, 80, (True,)),
        *(
            pytest.param(name, dtype, capability, (False, True), marks=pytest.mark.slow)
            for name in ("lstm", "ln_hyperlstm", "hyperrhn")
            for dtype, capability in ((torch.float64, 80), (torch.float16, 90), (torch.bfloat16, 80))
        ),
    ],
)
def test_kernels_compile_to_machine_code(name, dtype, capability, noisy, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = {}
    for kernel, arguments in _launches(name, dtype, monkeypatch, noisy=noisy):
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
    # Forward and backward, at least.
    assert len(compiled) >= 2 * len(noisy)
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


OBSTACLES = {
    "old": "triton needs a GPU of compute capability 8.0 or newer, found 7.5",
    "compiler": "triton needs a C compiler, which starts its kernels",
    "missing": "the package triton is not installed: pip install triton",
    "version": "triton must be 3.4 or newer, found 3.3.1+git",
    "cpu": "triton runs on CUDA devices (and with TRITON_INTERPRET=1, slowly, on the CPU)",
    "none": None,
}


@installed
@pytest.mark.parametrize("why", OBSTACLES)
def test_why_it_cannot_run_is_said(why, monkeypatch):
    capability = (7, 5) if why == "old" else (8, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(implementation, "_has_compiler", lambda: why != "compiler")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if why == "missing":
        monkeypatch.setattr(implementation.importlib.util, "find_spec", lambda name: None)
    if why == "version":
        monkeypatch.setattr(implementation, "_version", lambda: "3.3.1+git")
    device = torch.device("cpu" if why == "cpu" else "cuda")
    found, expected = implementation.obstacle(device), OBSTACLES[why]
    assert found is None if expected is None else found.startswith(expected)
    # A request says so, where it is asked for, and takes another backend, where it is not.
    cell = build_cell("lstm", 4, 5)
    request = cell.request(torch.ones(2, 1, 4))._replace(device=device, extras=("gal",))
    table._select.cache_clear()
    assert (table._select(request)[0] == "triton") == (why == "none")
    if expected is not None:
        with pytest.raises(UsageError, match=f"LSTM runs on .*reference only; {re.escape(expected)}"):
            table._select(request._replace(forced="triton"))


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
    from rhhn_fairseq.ops.lstm import GatedNumbers, make_buffers
    from rhhn_fairseq.ops.sequence import Masks

    h, c = torch.zeros(3, 2, 5), torch.zeros(3, 5, 2).transpose(1, 2)
    u = torch.zeros(3, 2, 20)
    buffers = make_buffers((u, h, c), (h[0], c[0]), [], Masks(), GatedNumbers(1.0))
    with pytest.raises(ValueError, match="c of strides"):
        implementation.step(buffers, None)
