"""The script that measures a GPU, at tiny sizes on the CPU: what it leaves behind, and how it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "measure_gpu.sh"


def run(*arguments, **environment):
    variables = os.environ | {"SMOKE": "1", "DEVICE": "cpu", "PYTHON": sys.executable} | environment
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_step_has_its_files(tmp_path):
    found = run(tmp_path / "new", "highway", "train")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith(f"== all figures are in {tmp_path / 'new'}\n")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {f"{step}.{kind}" for step in ("highway", "train") for kind in ("txt", "json", "png")}
    rows = json.loads((tmp_path / "new" / "highway.json").read_text())["rows"]
    assert {(row["cell"], row["dtype"]) for row in rows} >= {("hyperrhn", "bfloat16"), ("rhn", "float32")}
    rows = json.loads((tmp_path / "new" / "train.json").read_text())["rows"]
    assert {row["dtype"] for row in rows} == {"bfloat16"}


def test_a_step_that_fails_is_named(tmp_path):
    found = run(tmp_path, "highway", "lm", DEVICE="cuda:99")
    assert found.returncode == 1
    assert found.stderr == f"error: these steps failed, see their .txt in {tmp_path}: highway lm\n"
    assert "device='cuda:99', but torch finds" in (tmp_path / "lm.txt").read_text()
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("arguments", [(), ("DIR", "higway")])
def test_usage(arguments, tmp_path):
    found = run(*(tmp_path / "x" if part == "DIR" else part for part in arguments))
    assert found.returncode == 2
    assert "usage: bash scripts/measure_gpu.sh DIR [STEP ...], steps: tests gated highway lm" in found.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_all_benchmarks(tmp_path):
    steps = ("gated", "highway", "lm", "train", "decode", "memory", "scaling")
    found = run(tmp_path, *steps)
    assert found.returncode == 0, found.stdout + found.stderr
    assert len(list(tmp_path.iterdir())) == 3 * len(steps)
