"""Loading: in every order of imports the plugin is registered once, and the cells need no fairseq."""

import pytest
import torch
from helpers.cli import USER_DIR, python

REGISTERED = """
from fairseq.optim import OPTIMIZER_REGISTRY
assert "adam_l1" in OPTIMIZER_REGISTRY
"""

SAME_AS_WITHOUT_HOOK = """
import inspect, sys
assert "hydra_init()" in inspect.getsource(fairseq)
assert fairseq.__loader__ is fairseq.__spec__.loader
assert type(fairseq.__loader__).__name__ == "SourceFileLoader"
assert "exec_module" not in vars(fairseq.__loader__)
assert not [f for f in sys.meta_path if type(f).__name__ == "FairseqFinder"]
"""


def run(code: str, **options) -> None:
    result = python(code, **options)
    assert result.returncode == 0, result.stderr


def test_cells_import_no_fairseq():
    loaded = "[name for name in sys.modules if name.split('.')[0] in ('fairseq', 'hydra')]"
    use = "rhhn_fairseq.cells.build_cell('hyperlstm', 4, 5, hyper_size=3)(torch.zeros(2, 1, 4))"
    run(f"import sys, torch, rhhn_fairseq.cells; {use}; assert not {loaded}, {loaded}")


def test_package_before_fairseq():
    run(
        "import importlib.util, sys, rhhn_fairseq.cells\n"
        # Looking whether fairseq is there must neither load it nor use up the hook.
        "assert importlib.util.find_spec('fairseq').origin.endswith('__init__.py')\n"
        "assert 'fairseq' not in sys.modules\n"
        "import fairseq\n" + REGISTERED + SAME_AS_WITHOUT_HOOK
    )


def test_package_after_fairseq():
    run("import fairseq, rhhn_fairseq\n" + REGISTERED)


@pytest.mark.parametrize(
    "module, precision, expected",
    [
        ("models.handwriting", "", "highest"),
        ("tasks.detaching", "medium", "medium"),
    ],
)
def test_any_module_may_be_the_first_import(module, precision, expected):
    """It registers everything, and sets the precision of products that the environment asks for."""
    code = f"import torch; assert torch.get_float32_matmul_precision() == {expected!r}"
    run(f"import rhhn_fairseq.{module}\n{REGISTERED}\n{code}", RHHN_MATMUL_PRECISION=precision)


def test_threads_importing_both():
    run(
        "import threading\n"
        "def load(name): __import__(name)\n"
        "threads = [threading.Thread(target=load, args=(name,)) for name in\n"
        "           ('fairseq', 'rhhn_fairseq', 'rhhn_fairseq.cells', 'fairseq.trainer')]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n" + REGISTERED
    )


def test_user_dir_from_another_directory(tmp_path):
    """The package is not on the path: fairseq imports it from --user-dir, and twice does no harm."""
    run(
        "import argparse\n"
        "from fairseq import utils\n"
        f"args = argparse.Namespace(user_dir={USER_DIR!r})\n"
        "utils.import_user_module(args); utils.import_user_module(args)\n" + REGISTERED,
        cwd=tmp_path,
    )


NEEDED = "error: rhhn_fairseq needs fairseq-fixed==0.12.3.1: pip "


def test_missing_fairseq_is_one_line():
    result = python("import sys; sys.modules['fairseq'] = None; import rhhn_fairseq.plugin")
    assert result.returncode == 1
    assert result.stderr.startswith(f"{NEEDED}install fairseq-fixed==0.12.3.1 (")


@pytest.mark.parametrize(
    ("init", "utils"),
    [
        # What 0.12.2 does on Python 3.11, and a version that does not save the state of tasks.
        ("raise ValueError('mutable default <class ...> for field common is not allowed')", ""),
        ("__version__ = '1.0.0a0'", "def save_checkpoint(): pass"),
    ],
)
def test_old_fairseq_is_one_line(tmp_path, init, utils):
    package = tmp_path / "fairseq"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "checkpoint_utils.py").write_text(utils)
    result = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rhhn_fairseq.plugin")
    assert result.returncode == 1
    assert result.stderr.startswith(NEEDED) and result.stderr.count("\n") == 1


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="this torch has no such settings")
@pytest.mark.parametrize(
    "library, value, device, expected",
    [
        ("cuda", "tf32", "cuda", "high"),
        ("mkldnn", "bf16", "cpu", "medium"),
    ],
)
def test_matmul_precision_by_torchs_newer_settings(library, value, device, expected):
    run(
        "import torch; from rhhn_fairseq.cells import build_cell;"
        "from rhhn_fairseq.ops.matmul.gemm import matmul_precision;"
        f"torch.backends.{library}.matmul.fp32_precision = {value!r};"
        f"assert matmul_precision({device!r}) == {expected!r};"
        "build_cell('ln_lstm', 64, 64)(torch.randn(8, 40, 64))"
    )
