"""Builds the compiled point-wise kernels and adds the autoload file; all other metadata is in setup.cfg.

The C++ sources are built for this processor; with ``RHHN_NATIVE=all``, as for wheels that others install,
once for every level of processor that ``rhhn_fairseq.ops.native`` may load. Where a build fails, installation
goes on and the package uses torch's own operations instead.
"""

import copy
import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

LEVELS = {"any": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ["-march=x86-64-v3"]
    # prefetchw, which level 4 does not name: every processor with AVX-512 has it.
    LEVELS["avx512"] = ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mprfchw"]
    # What torch asks for before it names a processor AVX2 or AVX512, by the names of the kernel.
    NEEDED = {"avx512": "avx512f avx512bw avx512vl avx512dq fma avx2 bmi2", "avx2": "avx2 fma bmi2"}
    cpuinfo = Path("/proc/cpuinfo")
    if os.environ.get("RHHN_NATIVE") != "all" and cpuinfo.exists():
        flags = set(cpuinfo.read_text().partition("flags")[2].partition("\n")[0].split())
        here = next((level for level, names in NEEDED.items() if flags >= set(names.split())), "any")
        LEVELS = {here: LEVELS[here]}

HERE = Path("rhhn_fairseq/ops/native")
# Those that take longest first.
SOURCES = ("gated.cpp", "hyper_sequence.cpp", "highway.cpp", "matmul.cpp")
SOURCES += ("product.cpp", "integers.cpp", "energy.cpp")
HEADERS = ("gated.h", "math.h", "matmul.h", "normal.h", "rows.h", "scaling.h", "sequence.h", "vector.h")
# Vectorised without -ffast-math: NaN and infinity have to pass through, a diverged run must show.
# Python's own flags ask for debugging information: five sixths of the library, a third of the compile time.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-g0"]
# Apple's compiler has no OpenMP; one thread does the point-wise work there.
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]

AUTOLOAD = "rhhn_fairseq_autoload.pth"


class BuildInParallel(build_ext):
    """Compiles the sources of an extension at the same time, on all processors.

    Every extension has a directory of its own for its objects, because all levels are compiled from the same
    sources. In one directory, two builds at a time overwrite each other's objects, and a library is linked
    from those of another level.
    """

    def build_extensions(self):
        compile_all = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                return sum(threads.map(lambda source: compile_all([source], **options), sources), [])

        self.compiler.compile = compile_each
        super().build_extensions()

    def build_extension(self, ext):
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name.rpartition(".")[2])
        super(BuildInParallel, own).build_extension(ext)


class BuildWithAutoload(build_py):
    """Puts the file that Python reads at its start beside the packages; see ``rhhn_fairseq_autoload.py``."""

    def run(self):
        super().run()
        # An editable wheel has no build directory: what it holds itself is what ``install`` would install.
        place = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        Path(place).mkdir(parents=True, exist_ok=True)
        shutil.copy(AUTOLOAD, place)


setup(
    cmdclass={"build_ext": BuildInParallel, "build_py": BuildWithAutoload},
    ext_modules=[
        Extension(
            f"rhhn_fairseq.ops.native._{level}",
            sources=[str(HERE / name) for name in SOURCES],
            depends=[str(HERE / name) for name in HEADERS],
            extra_compile_args=[*FLAGS, *OPENMP, *flags],
            extra_link_args=OPENMP,
            language="c++",
            optional=True,
        )
        for level, flags in LEVELS.items()
    ],
)
