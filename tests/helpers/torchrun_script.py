"""scripts/train_torchrun.sh, and an environment without what a cluster sets."""

import os
import sys
from pathlib import Path

from helpers.cli import USER_DIR

SCRIPT = Path(USER_DIR).parent / "scripts" / "train_torchrun.sh"
# What a cluster or a shell of the person who tests may have set.
SETTINGS = ("NPROC", "NNODES", "RDZV_ENDPOINT", "RDZV_ID", "MAX_RESTARTS", "OMP_NUM_THREADS")


def environment(**values) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    kept = {name: value for name, value in kept.items() if not name.startswith("SLURM_")}
    return kept | {"PYTHON": sys.executable} | values
