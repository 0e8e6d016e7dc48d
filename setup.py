"""Builds the compiled point-wise kernels; all other metadata is in setup.cfg.

The C++ sources are built once for every level of processor that ``rhhn_fairseq.ops.native`` may load.
Where a build fails, installation goes on and the package uses torch's own operations instead.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup

LEVELS = {"any": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    LEVELS["avx2"] = ["-march=x86-64-v3"]
    # prefetchw, which level 4 does not name: every processor with AVX-512 has it.
    LEVELS["avx512"] = ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mprfchw"]

HERE = Path("rhhn_fairseq/ops/native")
SOURCES = ("energy.cpp", "gated.cpp", "highway.cpp", "hyper_sequence.cpp", "matmul.cpp", "product.cpp")
HEADERS = ("gated.h", "math.h", "matmul.h", "normal.h", "rows.h", "scaling.h", "sequence.h", "vector.h")
# Vectorised without -ffast-math: NaN and infinity have to pass through, a diverged run must show.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
# Apple's compiler has no OpenMP; one thread does the point-wise work there.
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]

setup(
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
    ]
)
