"""``rhhn_fairseq.nn`` and what it stands on, in a process that can import nothing but torch and numpy."""

import subprocess
import sys

import rhhn_fairseq
from rhhn_fairseq.cells import CELLS, build_cell
from rhhn_fairseq.nn import layer_of

BLOCKED = """
import importlib.metadata as metadata, re, sys

def needs(name, known):
    # What a distribution requires without extras, and what that requires.
    if name in known:
        return known
    known.add(name)
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return known
    for line in requirements:
        if "extra ==" not in line:
            needs(re.match(r"[A-Za-z0-9._-]+", line)[0].lower().replace("_", "-"), known)
    return known

allowed = needs("torch", set()) | needs("numpy", set()) | {"rhhn-fairseq"}

class Blocker:
    homes = metadata.packages_distributions()

    def find_spec(self, name, path=None, target=None):
        owners = {owner.lower().replace("_", "-") for owner in self.homes.get(name.split(".")[0], ())}
        if owners and not owners & allowed:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Blocker())
for name in ("fairseq", "matplotlib", "sentencepiece", "tqdm"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} is not blocked")
"""

USE = """
import importlib, pkgutil, sys
from rhhn_fairseq.nn import HyperLSTM
import torch

rnn = HyperLSTM(4, 6, 2, bidirectional=True, hyper_size=3)
y, state = rnn(torch.randn(5, 2, 4))
# Modules that take seconds to import, and those that change the process.
slow = "fairseq hydra torch._dynamo torch._inductor triton matplotlib rhhn_fairseq.ops.memory"
assert not [name for name in slow.split() if name in sys.modules]
y.sum().backward()

import rhhn_fairseq.nn, rhhn_fairseq.cells
for package in ("nn", "cells", "layers", "ops"):
    home = importlib.import_module(f"rhhn_fairseq.{package}")
    for module in pkgutil.walk_packages(home.__path__, f"{home.__name__}."):
        if ".ops.triton." not in module.name and ".ops.native._" not in module.name:
            importlib.import_module(module.name)
for name in rhhn_fairseq.cells.CELLS:
    small = {"hyper_size": 3} if "hyper" in name else {}
    y, _ = rhhn_fairseq.nn.layer_of(name)(4, 6, **small)(torch.randn(5, 2, 4))
    y.sum().backward()
"""


def test_torch_and_numpy_are_enough():
    command = [sys.executable, "-c", BLOCKED + USE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_the_packaged_model_samples_with_safetensors_beside_them():
    code = BLOCKED.replace('{"rhhn-fairseq"}', '{"rhhn-fairseq", "safetensors"}')
    code += "from rhhn_fairseq.__main__ import main; main()"
    command = [sys.executable, "-c", code, "sample", "--pretrained", "--length", "20", "--prompt", "def "]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout.startswith("def "), result.stderr


def test_names_of_the_package():
    assert rhhn_fairseq.build_cell is build_cell
    assert rhhn_fairseq.__version__.count(".") == 2
    assert not hasattr(rhhn_fairseq, "build_sell")


def test_loading_a_module_imports_no_compiler(tmp_path):
    for name in CELLS:
        small = {"hyper_size": 3} if "hyper" in name else {}
        layer_of(name)(4, 6, **small).save_pretrained(tmp_path / name)
    code = f"""
import sys
from pathlib import Path
from rhhn_fairseq.nn import from_pretrained, packaged

packaged("characters")
for folder in sorted(Path({str(tmp_path)!r}).iterdir()):
    from_pretrained(folder)
    assert "torch._dynamo" not in sys.modules, folder.name
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
