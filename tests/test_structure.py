"""How the package is built: which module imports which, how many parameters functions take,
how many calls a pass makes."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from rhhn_fairseq.cells import build_cell
from rhhn_fairseq.ops import native, policy

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rhhn_fairseq"

# Packages that a function may import, by file or folder. fairseq's modules are adapted when they are loaded,
# not before. The others are optional, or slow to import and needed by few callers.
IMPORTED_IN_FUNCTIONS = {
    "compat": {"fairseq", "hydra"},
    # The packaged models sample where it is not installed.
    "compat/names.py": {"argcomplete"},
    # --help answers at once.
    "cli": {"rhhn_fairseq", "torch", "fairseq", "omegaconf", "numpy", "tqdm"},
    "data/common/manifest.py": {"tqdm"},
    "data/problems/images.py": {"sklearn"},
    "data/strokes/hershey.py": {"HersheyFonts"},
    "data/strokes/svg.py": {"svgelements"},
    "nn/recurrent.py": {"torch.distributed.tensor"},
    "ops/triton/__init__.py": {"triton", "rhhn_fairseq.ops.triton"},
}

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources() -> list[tuple[str, ast.Module]]:
    """Every module of the package: its path below the package and its syntax tree."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_bytes())) for path in paths]


def imports_in_functions(tree: ast.AST) -> list[str]:
    """Names of the modules that functions of ``tree`` import."""
    names = []
    for function in (node for node in ast.walk(tree) if isinstance(node, FUNCTION)):
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names.append("." * node.level + (node.module or ""))
    return names


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of a function's parameters, without ``self`` and ``cls``."""
    args = function.args
    listed = [*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg]
    names = [each.arg for each in listed if each is not None]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def is_triton_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function runs on a GPU: Triton launches it with one parameter for each pointer and stride."""
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


def test_import_contracts_hold():
    # In a process of its own, because the program configures logging.
    program = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([program, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_functions_import_optional_packages_only():
    refused = []
    for path, tree in sources():
        allowed = {
            name for place, names in IMPORTED_IN_FUNCTIONS.items() if path.startswith(place) for name in names
        }
        for name in imports_in_functions(tree):
            if not any(name == package or name.startswith(f"{package}.") for package in allowed):
                refused.append(f"{path}: {name}")
    assert not refused


def test_functions_have_ten_parameters_at_most():
    too_many = [
        f"{path}:{node.lineno} {node.name} has {len(parameters(node))}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTION) and not is_triton_kernel(node) and len(parameters(node)) > 10
    ]
    assert not too_many


@pytest.mark.skipif(not native.multiplies(), reason="needs the compiled kernels and AVX2")
@pytest.mark.parametrize("matmul, functions", [("torch", 51), ("native", 56)])
def test_a_pass_makes_few_calls(monkeypatch, matmul, functions):
    """A small network's time goes into Python's calls, so their number is held."""
    monkeypatch.setattr(policy, "current", functools.cache(policy.Policy.from_environment))
    monkeypatch.setenv("RHHN_KERNEL", "native")
    monkeypatch.setenv("RHHN_MATMUL", matmul)
    cell = build_cell("ln_hyperlstm", 128, 128, hyper_size=32, hyper_embed_size=4).train()
    x_TBC = torch.randn(50, 16, 128)
    for _ in range(3):
        cell(x_TBC)
    calls = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            calls[frame.f_code] += 1

    sys.setprofile(count)
    try:
        cell(x_TBC)
    finally:
        sys.setprofile(None)
    assert 0 < calls.total() <= 90
    assert len(calls) <= functions
    assert len({code.co_filename for code in calls}) <= 14
