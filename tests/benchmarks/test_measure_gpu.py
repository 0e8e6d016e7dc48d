"""The script that measures a GPU, at tiny sizes on the CPU: what it leaves behind, and how it fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_gpu.sh"


def run(*arguments, cwd=None, **environment):
    variables = os.environ | {"SMOKE": "1", "DEVICE": "cpu", "PYTHON": sys.executable} | environment
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        env=variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


EVERY = ("gated", "highway", "lm", "train", "decode", "memory")


@pytest.mark.slow
def test_every_step_has_its_files(tmp_path):
    found = run(tmp_path / "new", *EVERY)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith(f"== all figures are in {tmp_path / 'new'}\n")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {f"{step}.{kind}" for step in EVERY for kind in ("txt", "json")}
    rows = json.loads((tmp_path / "new" / "highway.json").read_text())["rows"]
    assert {(row["name"], row["type"]) for row in rows} >= {("hyperrhn", "bfloat16"), ("rhn", "float32")}


@pytest.mark.slow
def test_a_step_that_fails_is_named(tmp_path):
    """Its files of an earlier run go; the directory is where the script is called."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "lm.json").write_text("{}")
    failed = run("out", "lm", cwd=tmp_path, DEVICE="cuda:99")
    assert failed.returncode == 1
    assert failed.stderr == f"error: these steps failed, see their .txt in {out}: lm\n"
    assert "--device cuda:99: torch finds" in (out / "lm-plain.txt").read_text()
    assert not list(out.glob("*.json"))


def python_that_needs(option, path):
    """The path of a Python that dies, as of a kernel's fault, where no argument holds an option."""
    path.write_text(f'#!/bin/sh\ncase "$*" in *{option}*) exec {sys.executable} "$@" ;; esac\nexit 139\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("needed, then", [("--backends", "no-triton"), ("aten,reference", "plain")])
def test_a_benchmark_that_fails_is_run_without_triton_and_then_without_graphs(needed, then, tmp_path):
    """Without Triton it would name aten+graphs between aten and reference."""
    out = tmp_path / "out"
    found = run(out, "highway", PYTHON=python_that_needs(needed, tmp_path / "python"))
    assert found.returncode == 1 and found.stderr.endswith(": highway\n")
    assert (out / "highway.txt").read_text() == ""
    assert [path.name for path in out.glob("*.json")] == [f"highway-{then}.json"]
    rows = json.loads((out / f"highway-{then}.json").read_text())["rows"]
    assert "triton" not in {row["backend"] for row in rows}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tests_without_a_gpu_fail(tmp_path):
    found = run(tmp_path, "tests")
    assert found.returncode == 1
    assert (tmp_path / "tests.txt").read_text().endswith("torch finds no GPU\n")


WAITING = """#!{python}
import os, time

# Opened for both, the pipe keeps what is written until it is read.
os.write(os.open({pipe!r}, os.O_RDWR), b"x")
time.sleep(60)
"""


def test_an_interruption_ends_it(tmp_path):
    """A Python that is interrupted while it works; a script that went on would end with another status."""
    pipe, python, out = tmp_path / "pipe", tmp_path / "python", tmp_path / "out"
    os.mkfifo(pipe)
    python.write_text(WAITING.format(python=sys.executable, pipe=str(pipe)))
    python.chmod(0o755)
    variables = os.environ | {"SMOKE": "1", "DEVICE": "cpu", "PYTHON": str(python)}
    command = ["bash", str(SCRIPT), str(out), "memory", "gated"]
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, start_new_session=True) as process:
        # Returns when the program of the first step runs.
        assert pipe.open("rb").read(1) == b"x"
        # As a terminal does it: all of them.
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130 and said.endswith(b"error: interrupted\n")
    assert {path.stem for path in out.iterdir()} == {"memory"}


@pytest.mark.parametrize("arguments", [(), ("DIR", "higway")])
def test_usage(arguments, tmp_path):
    found = run(*(tmp_path / "x" if part == "DIR" else part for part in arguments))
    assert found.returncode == 2
    assert "usage: bash scripts/measure_gpu.sh DIR [STEP ...], steps: tests gated highway lm" in found.stderr
    assert not (tmp_path / "x").exists()
