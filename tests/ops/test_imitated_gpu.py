"""What runs on a GPU, on one that is imitated in host memory (gpu_imitation/device.cpp).

In processes of their own, since torch has to find it when it starts. Where torch has code for a GPU the tests
marked gpu are for that.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_imitation import compiled
from helpers import tiny_translation
from helpers.cli import USER_DIR, json_log, run_module

TESTS = Path(__file__).parents[1]
FOLDER = TESTS / "gpu_imitation"


@pytest.fixture(scope="module", autouse=True)
def device():
    """The environment of a process with the imitated GPU, whose code is compiled by then."""
    if compiled.obstacle():
        pytest.skip(f"no GPU can be imitated: {compiled.obstacle()}")
    compiled.library()


def run(*arguments, **variables):
    """Runs Python with that GPU; what it wrote to standard output and to standard error."""
    paths = [str(path) for path in (FOLDER, TESTS)] + [os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment | variables, cwd=TESTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-10000:] + done.stderr[-5000:]
    return done.stdout, done.stderr


def run_tests(*arguments, **variables) -> int:
    """Runs tests; how many passed. None may be skipped."""
    said, _ = run(
        "-m", "pytest", "-q", "-p", "imitated_gpu", "-p", "no:cacheprovider", *arguments, **variables
    )
    assert "skipped" not in said, said
    return int(re.search(r"(\d+) passed", said).group(1))


# Of two narrow types one, few of the largest cell, and character models of some cells.
QUICK = "(cases or not (reference or dtype1 or hyperrhn)) and not (test_char_lm and not (hyperlstm or gru))"


@pytest.mark.parametrize("chosen", [QUICK, pytest.param("gpu", marks=pytest.mark.slow)], ids=["quick", "all"])
def test_the_imitation_and_what_is_marked_gpu(chosen):
    """In one process, which takes a while to start."""
    files = [TESTS / "ops" / f"test_{name}.py" for name in ("graphs", "decoding_graph", "backends")]
    cases = ["-m", "gpu", "-k", chosen, FOLDER / "cases.py", *files]
    assert run_tests(*cases, "--rootdir", TESTS.parent) > 40


@pytest.mark.slow
def test_triton_kernels_in_graphs():
    """By Triton's interpreter: what a real GPU runs by default."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    cases = [TESTS / "ops" / "test_graphs.py", "-k", "graphs_on_a_gpu_equal_the_loop and ln_lstm"]
    assert run_tests("-m", "gpu", *cases, TRITON_INTERPRET="1", RHHN_KERNEL="triton") == 1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny_translation.prepare(tmp_path_factory.mktemp("corpus"))


def program(name, corpus, *options, graphs=0):
    """Runs one of fairseq's programs, without --cpu on that GPU; its standard output. It warns of nothing."""
    task = ["--task", "gnmt_translation", "--user-dir", USER_DIR]
    if "--cpu" in options:
        return run_module(f"fairseq_cli.{name}", [corpus, *task, *options]).stdout
    module = [FOLDER / "imitated_gpu.py", f"fairseq_cli.{name}", corpus, *task, *options]
    said, warned = run(*module, RHHN_CUDA_GRAPHS=str(graphs))
    assert "Warning" not in warned
    return said


def losses(corpus, folder, *options, graphs=0):
    sizes = ["--hidden-size", 16, "--embed-dim", 12, "--encoder-layers", 2, "--decoder-layers", 2]
    batch = ["--max-tokens", 400, "--optimizer", "adam", "--lr", 0.01, "--clip-norm", 5, "--max-update", 8]
    logs = ["--log-format", "json", "--log-interval", 1, "--save-dir", folder, "--disable-validation"]
    model = ["--arch", "lstm_gnmt_small", *sizes, "--dropout", 0, "--seed", 1]
    # What learns within eight updates.
    model += ["--criterion", "cross_entropy", "--lr-scheduler", "fixed", "--warmup-updates", 0]
    said = program("train", corpus, *model, *batch, *logs, *options, graphs=graphs)
    return [record["loss"] for record in json_log(said) if record["tag"] == "train_inner"]


def translations(corpus, folder, *options, graphs=0):
    search = ["--path", folder / "checkpoint_last.pt", "--beam", 3, "--batch-size", 5]
    said = program("generate", corpus, *search, *options, graphs=graphs)
    return sorted(re.findall(r"^H-(\d+)\t\S+\t(.*)$", said, re.M))


@pytest.fixture(scope="module")
def on_the_cpu(corpus, tmp_path_factory):
    return losses(corpus, tmp_path_factory.mktemp("cpu"), "--cpu")


@pytest.mark.slow
def test_training_and_generation(corpus, on_the_cpu, tmp_path):
    """By the programs, as a user would: the same on the CPU, and on the GPU with its graphs."""
    assert len(on_the_cpu) == 8 and on_the_cpu[-1] < 0.9 * on_the_cpu[0]
    # Reported with three decimals.
    assert losses(corpus, tmp_path / "gpu", graphs=1) == pytest.approx(on_the_cpu, abs=2e-3)
    found = translations(corpus, tmp_path / "gpu", "--cpu")
    assert len(found) == tiny_translation.SPLITS["test"]
    assert found == translations(corpus, tmp_path / "gpu", graphs=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["--fp16", "--bf16", "--amp"])
def test_training_in_narrow_types(kind, corpus, on_the_cpu, tmp_path):
    # Measured: 0.0016 at most, of --amp.
    assert losses(corpus, tmp_path, kind, graphs=1) == pytest.approx(on_the_cpu, rel=5e-3)
