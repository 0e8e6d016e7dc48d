"""The build of the compiled libraries: every level has objects of its own."""

import ctypes
import runpy
from pathlib import Path

import pytest
import setuptools
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parents[2]


@pytest.fixture
def arguments(monkeypatch):
    """What setup.py passes to ``setuptools.setup``."""
    passed = {}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: passed.update(arguments))
    runpy.run_path("setup.py")
    return passed


def test_libraries_of_the_same_sources_are_built_side_by_side(arguments, tmp_path, monkeypatch):
    """In a common directory, one build would link objects of another."""
    monkeypatch.chdir(tmp_path)
    Path("level.c").write_text("int level(void) { return LEVEL; }\n")
    levels = {"one": "1", "two": "2", "three": "3"}
    extensions = [
        setuptools.Extension(f"package._{name}", ["level.c"], define_macros=[("LEVEL", level)])
        for name, level in levels.items()
    ]
    distribution = setuptools.Distribution({"name": "levels", "ext_modules": extensions})
    command = arguments["cmdclass"].get("build_ext", build_ext)(distribution)
    command.parallel, command.build_lib, command.build_temp = 3, "lib", "temp"
    command.ensure_finalized()
    command.run()
    for name, level in levels.items():
        (library,) = Path("lib/package").glob(f"_{name}.*")
        assert ctypes.CDLL(str(library.resolve())).level() == int(level)
        assert Path(f"temp/_{name}/level.o").is_file()
