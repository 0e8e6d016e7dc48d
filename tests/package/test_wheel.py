"""The wheel, built from the source distribution and installed without the repository: every program runs."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

SMALL = (
    "--arch char_lm --cell ln_hyperlstm --hidden-size 16 --hyper-size 4 --hyper-embed-size 2 --cpu".split()
)
SMALL += "--optimizer adam --lr 0.01 --batch-size 8 --tokens-per-sample 20 --num-workers 0".split()


def run(*command, cwd: Path) -> str:
    """What a command prints; both streams. It sees nothing of the tests' environment."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "RHHN_DATA_DIR", "RHHN_AUTOLOAD")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    result = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-5000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, for which only what the source distribution holds is there."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    left = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__", "data-bin")
    shutil.copytree(ROOT, source, symlinks=True, ignore=left)
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", folder, cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, archive, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment with the wheel, and with the tests' torch and fairseq in its path."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    interpreter = folder / "bin" / "python"
    site = Path(run(interpreter, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip())
    # Only a path: the tests' own installation of the package, in a file .pth there, is not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["--python", interpreter, "install", "--quiet", "--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", *options, wheel, cwd=folder)
    return interpreter


def test_it_holds_what_it_needs(python, tmp_path):
    code = "import rhhn_fairseq, rhhn_fairseq.ops.native as n; print(rhhn_fairseq.__file__, n.library())"
    place, library = run(python, "-c", code, cwd=tmp_path).split(maxsplit=1)
    package = Path(place).parent
    assert package.parent.parent.parent.parent == python.parent.parent
    assert "None" not in library
    files = list((ROOT / "configs").glob("*.yaml"))
    assert len(files) >= 4
    for path in files:
        assert (package / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    assert (package / "py.typed").is_file()
    assert run(python.with_name("rhhn"), "--version", cwd=tmp_path) == "rhhn_fairseq 0.2.0\n"


def test_prepares_trains_evaluates_and_samples(python, tmp_path):
    rhhn, data = python.with_name("rhhn"), tmp_path / "data"
    prepared = run(rhhn, "prepare", "stdlib", "--size", 20_000, "--dest", data, cwd=tmp_path)
    assert prepared.startswith(f"prepared: {data}\n")

    # fairseq's own program, which is told nothing about the package.
    train = [data, *SMALL, "--max-epoch", 1, "--save-dir"]
    output = run(python, "-m", "fairseq_cli.train", *train, "first", cwd=tmp_path)
    assert "done training" in output
    run(rhhn, "train", *train, "second", cwd=tmp_path)
    weights = "import torch; load = lambda name: torch.load(f'{name}/checkpoint_best.pt')['model'];"
    weights += "a, b = load('first'), load('second'); assert all(torch.equal(a[name], b[name]) for name in a)"
    run(python, "-c", weights, cwd=tmp_path)

    path = "first/checkpoint_best.pt"
    options = [data, "--path", path, "--gen-subset", "test", "--cpu"]
    figures = [
        re.findall(r"(\S+) bits per character", run(*program, *options, cwd=tmp_path))
        for program in ([rhhn, "eval-lm"], [python, "-m", "fairseq_cli.eval_lm"])
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 1
    text = run(rhhn, "sample", path, "--prompt", "def ", "--length", 20, cwd=tmp_path)
    assert text.startswith("def ") and len(text) == len("def ") + 20 + 1
