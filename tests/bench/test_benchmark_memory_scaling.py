"""The benchmarks of memory and growth: what was taken is measured, and what is linear is called so."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rhhn_fairseq.bench import memory, scaling
from rhhn_fairseq.bench.contenders import BASELINE
from rhhn_fairseq.errors import UsageError

MEGABYTE = 1 << 20


def test_the_peak_is_what_a_pass_holds():
    """A pass that fills 64 MB and lets them go: the peak is that, whatever was held and freed before it."""
    fill = """
import torch
from rhhn_fairseq.bench import memory
torch.ones(96 << 20, dtype=torch.uint8)
def time_pass(module, x, gradient):
    if len(x) > 1:
        torch.ones(64 << 20, dtype=torch.uint8)
memory.time_pass = time_pass
config = memory.Config(**memory.SMOKE, threads=1)
print(memory.peak_of_this_process(config, ("ln_hyperlstm", "reference", "float32")))
"""
    result = subprocess.run([sys.executable, "-c", fill], capture_output=True, text=True)
    if "choose larger sizes" in result.stderr:
        pytest.skip("the kernel does not let a process forget its peak")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == pytest.approx(64 * MEGABYTE, rel=0.05)


def test_report_of_memory(monkeypatch):
    # At this size the code that oneDNN makes for every shape of a product would be most of it.
    monkeypatch.setenv("RHHN_MATMUL", "torch")
    config = memory.Config(**memory.SMOKE, threads=1, backends=("aten", "reference"))
    report = memory.run(config)
    base, aten, reference = report["rows"]
    assert (base["cell"], aten["backend"], reference["backend"]) == (BASELINE, "aten", "reference")
    assert base["ratio"] is None and reference["ratio"] == 1.0
    for row in (aten, reference):
        # The states and gates of 16 steps of 16 sequences are there at least.
        assert row["bytes"][0] > 4 * 16 * 16 * (4 * 64 + 2 * 64)
        assert row["peak_mb"] == pytest.approx(row["bytes"][0] / 1e6)
        assert row["error"] < 1e-4
    # Kernels keep the sums before the gates, autograd what every operation needs.
    assert aten["ratio"] < 1.0
    assert memory.draw(report).axes


def test_a_process_that_fails_is_reported(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="")
    monkeypatch.setattr(memory.subprocess, "run", lambda *arguments, **options: failed)
    contender = SimpleNamespace(key=("lstm", "aten", "float32"))
    with pytest.raises(UsageError, match="the process that measures lstm aten float32 failed"):
        memory.peak_of(contender, memory.Config(**memory.SMOKE))


def test_growth_is_the_power_of_the_size():
    cubes = [np.array([2.0, 5.0]) * 8**n for n in range(4)]
    assert scaling.growth_exponent(cubes) == pytest.approx(3.0)
    # The median over rounds, one of which was disturbed.
    times = [np.array([1.0, 1.0, 1.0]) * 2**n for n in range(3)]
    times[2] = times[2] * np.array([1.0, 1.0, 9.0])
    assert scaling.growth_exponent(times) == pytest.approx(1.0)


def test_what_is_not_linear_is_said():
    text = scaling.describe_growth("lstm aten float32", {"T": 1.04, "H": 1.9, "B": 0.4})
    assert text == "lstm aten float32: the time of a pass grows as T^1.04, H^1.90, B^0.40; linear in T"
    text = scaling.describe_growth("lstm aten float32", {"T": 1.3, "H": 1.0, "B": 0.4})
    assert text.endswith("; NOT linear in T (more than T^1.1)")


def test_one_size_doubles_at_a_time():
    config = scaling.Config(**scaling.SMOKE | {"doublings": 2})
    points = config.points()
    assert len(points) == 9
    for (size, n), sizes in points.items():
        changed = {scaling.SIZES[size]: getattr(config, scaling.SIZES[size]) * 2**n}
        assert sizes == dataclasses.replace(config, **changed)


def test_report_of_scaling():
    config = scaling.Config(**scaling.SMOKE, threads=1, backends=("reference",))
    report = scaling.run(config)
    # Three sizes, each at its start and doubled, for the baseline and one backend.
    assert [(row["cell"], row["size"]) for row in report["rows"]] == [
        (name, size) for name in (BASELINE, "ln_hyperlstm") for size in "TTHHBB"
    ]
    for row in report["rows"]:
        seconds = np.array(row["seconds"])
        assert row["token_us"] == pytest.approx(1e6 * np.median(seconds) / (row["T"] * row["B"]))
        assert row["error"] < 1e-4
    assert [(row["T"], row["H"], row["B"]) for row in report["rows"][:6]] == [
        (4, 8, 2), (8, 8, 2), (4, 8, 2), (4, 16, 2), (4, 8, 2), (4, 8, 4)
    ]  # fmt: skip
    start, doubled = report["rows"][:2]
    assert "growth" not in start and "exponent" not in start
    # With one doubling the power is the logarithm of the growth.
    assert 2 ** doubled["exponent"] == pytest.approx(doubled["growth"])
    assert len(report["notes"]) == 2 and "linear in T" in report["notes"][1]
    assert len(scaling.draw(report).axes) == 3


def test_sizes_that_are_too_large_are_refused_before_anything_is_measured():
    with pytest.raises(UsageError, match="length=1638400 is too large"):
        scaling.Config(doublings=100).points()


def test_a_cell_scales_with_and_without_segments():
    sizes = scaling.SMOKE | {"cells": ("lstm",), "backends": ("aten",), "recompute_steps": 2, "doublings": 1}
    report = scaling.run(scaling.Config(**sizes))
    assert list(dict.fromkeys(row["backend"] for row in report["rows"]))[1:] == ["aten", "aten, parts of 2"]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (memory.Config, {"cells": ("lstmm",)}, "--cells lstmm is unknown"),
        (memory.Config, {"dtype": ()}, "dtype is empty, choose from float32, bfloat16"),
        (memory.Config, {"length": 10**7}, "length=10000000 is too large, the largest is 1000000"),
        (scaling.Config, {"hidden": 10**7}, "hidden=10000000 is too large, the largest is 1000000"),
        (scaling.Config, {"doublings": 0}, "doublings=0 is too small"),
        (scaling.Config, {"cells": ("rhn", "rhn")}, "--cells rhn,rhn names one twice"),
    ],
)
def test_what_cannot_work_is_refused(config, changes, message):
    with pytest.raises(UsageError, match=message):
        config(**changes)
