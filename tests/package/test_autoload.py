"""Where the package is installed, fairseq's programs find it without --user-dir."""

import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from helpers.cli import python
from helpers.tiny_char_lm import write_corpus

from rhhn_fairseq import FairseqFinder
from rhhn_fairseq_autoload import runs_fairseq, user_dir

ROOT = Path(__file__).resolve().parents[2]

# The repository may be installed here: what that installation left behind is taken away first.
START = """
import importlib.util, site, sys
sys.path.remove("")
sys.meta_path = [finder for finder in sys.meta_path if "ditable" not in repr(finder)]
sys.meta_path = [finder for finder in sys.meta_path if type(finder).__name__ != "ProgramFinder"]
sys.modules.pop("rhhn_fairseq_autoload", None)
site.addsitedir({installed!r})
sys.argv = {line!r}
{then}
print("rhhn_fairseq" in sys.modules and sys.modules["rhhn_fairseq"].__path__[0])
"""
FIND = "importlib.util.find_spec('fairseq')"
IMPORT = "import fairseq.tasks; assert 'char_lm' in fairseq.tasks.TASK_REGISTRY"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A directory such as site-packages with what an installation puts there."""
    place = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "rhhn_fairseq_autoload.py", place)
    shutil.copy(ROOT / "rhhn_fairseq_autoload.pth", place)
    shutil.copytree(ROOT / "rhhn_fairseq", place / "rhhn_fairseq")
    return place


def start(installed, line, cwd, then=FIND, **env) -> str:
    """The copy of the package that a program of this command line has imported; "False" for none."""
    code = START.format(installed=str(installed), line=line, then=then)
    result = python(code, cwd, **env)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_programs_find_the_installed_package_from_anywhere(installed, tmp_path):
    for line in (["/bin/fairseq-eval-lm"], ["/bin/fairseq-train", "--user-dir", "rhhn_fairseq"]):
        assert start(installed, line, tmp_path) == str(installed / "rhhn_fairseq")


def test_the_plugin_follows_fairseq(installed, tmp_path):
    line = ["/bin/fairseq-eval-lm"]
    assert start(installed, line, tmp_path, then=IMPORT) == str(installed / "rhhn_fairseq")


def test_a_copy_that_is_named_is_the_one_to_import(installed, tmp_path):
    copy = tmp_path / "rhhn_fairseq"
    shutil.copytree(ROOT / "rhhn_fairseq", copy)
    assert start(installed, ["/bin/fairseq-train", "--user-dir=rhhn_fairseq"], tmp_path) == str(copy)
    assert start(installed, ["/bin/fairseq-hydra-train"], tmp_path) == str(copy)


def test_nothing_else_imports_it(installed, tmp_path):
    (tmp_path / "mine").mkdir()
    assert start(installed, ["/bin/notebook"], tmp_path) == "False"
    assert start(installed, ["/bin/fairseq-train", "--user-dir", "mine"], tmp_path) == "False"
    assert start(installed, ["/bin/fairseq-train"], tmp_path, RHHN_AUTOLOAD="0") == "False"


def test_a_missing_directory_ends_in_one_line(installed, tmp_path):
    line = ["/bin/fairseq-train", "data", "--user-dir", "mime"]
    train = "from fairseq_cli.train import cli_main; cli_main()"
    result = python(START.format(installed=str(installed), line=line, then=train), tmp_path)
    assert result.returncode == 1
    assert result.stderr == f"error: --user-dir mime: there is no directory {tmp_path / 'mime'}\n"


def test_the_start_of_python_imports_neither_torch_nor_fairseq(installed):
    code = f"import site; site.addsitedir({str(installed)!r})"
    command = [sys.executable, "-I", "-S", "-X", "importtime", "-c", code]
    listed = subprocess.run(command, capture_output=True, text=True).stderr
    modules = [line.split("|")[2].strip() for line in listed.splitlines() if line.count("|") == 2]
    assert "rhhn_fairseq_autoload" in modules
    heavy = ("torch", "fairseq", "numpy", "hydra", "rhhn_fairseq")
    assert not [name for name in modules if name.split(".")[0] in heavy]


def test_command_lines():
    assert runs_fairseq(["/usr/bin/fairseq-train"]) and runs_fairseq(["/x/fairseq_cli/eval_lm.py"])
    assert not runs_fairseq(["/x/train.py"]) and not runs_fairseq(["-c"]) and not runs_fairseq([])
    assert user_dir(["fairseq-train", "--user-dir", "a"]) == "a"
    assert user_dir(["fairseq-train", "--user-dir=b"]) == "b"
    assert user_dir(["fairseq-hydra-train", "+common.user_dir=c"]) == "c"
    assert user_dir(["fairseq-hydra-train"]) == "rhhn_fairseq"
    assert user_dir(["fairseq-train"]) is None


def test_a_search_within_a_search_follows_fairseq_once(tmp_path):
    """So it is where the package is imported first, as by ``rhhn train``."""
    (tmp_path / "module.py").write_text("runs = globals().get('runs', 0) + 1\n")
    loader = SourceFileLoader("module", str(tmp_path / "module.py"))
    for _ in range(2):
        FairseqFinder().follow(loader)
    module = ModuleType("module")
    loader.exec_module(module)
    assert module.runs == 1 and "exec_module" not in vars(loader)


def test_user_dir_of_the_packages_name_is_the_imported_package(tmp_path):
    """From a directory without one of that name, and with neither beside fairseq."""
    corpus = write_corpus(tmp_path)
    sizes = ["--hidden-size", 8, "--hyper-size", 4, "--tokens-per-sample", 5, "--batch-size", 2, "--cpu"]
    line = [corpus, "--user-dir", "rhhn_fairseq", "--arch", "ln_hyperlstm_ptb", "--max-update", 1, *sizes]
    words = ["train", *map(str, line), "--save-dir", str(tmp_path / "saved")]
    code = "import rhhn_fairseq; from fairseq_cli.train import cli_main; cli_main()"
    result = python(f"import sys; sys.argv = {words}; {code}", tmp_path)
    assert "num_updates 1" in result.stdout
