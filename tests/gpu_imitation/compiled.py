"""The compiled part of an imitated GPU, ``device.cpp``, for the torch that is installed."""

import hashlib
import importlib.util
import os
import runpy
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
BUILD = Path(__file__).parents[2] / "build" / "gpu_imitation"
COMPILER = os.environ.get("CXX", "c++")
TORCH = Path(importlib.util.find_spec("torch").origin).parent
VERSION = runpy.run_path(str(TORCH / "version.py"))


def obstacle() -> str | None:
    """Why there can be none here; None if it can."""
    if VERSION["cuda"] or VERSION["hip"]:
        return f"torch {VERSION['__version__']} has a GPU's code of its own"
    if not (TORCH / "include" / "ATen" / "ATen.h").exists():
        return f"{TORCH} has no headers"
    if not shutil.which(COMPILER):
        return f"there is no compiler {COMPILER}"
    return None


def library() -> Path:
    """Where it lies; compiled first if it is not there, in some 20 seconds.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    what = SOURCE.read_bytes() + str(TORCH).encode() + VERSION["__version__"].encode()
    made = BUILD / f"device_{hashlib.sha256(what).hexdigest()[:16]}.so"
    if made.exists():
        return made
    BUILD.mkdir(parents=True, exist_ok=True)
    beside = made.with_suffix(f".{os.getpid()}")
    folders = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"]
    options = ["-std=c++20", "-O1", "-fPIC", "-shared"]
    command = [COMPILER, *options, str(SOURCE), "-o", str(beside), *folders, "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    beside.rename(made)
    return made
