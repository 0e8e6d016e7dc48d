#!/usr/bin/env bash
# Lint and tests, in the environment of scripts/quickstart.sh with the dev extras.
# Usage: scripts/test.sh [pytest options], for example scripts/test.sh --slow -k cells.
set -euo pipefail
cd "$(dirname "$0")/.."
# Every build of the kernels, because they are compared with one another.
export RHHN_NATIVE=all
bash scripts/install.sh dev
.venv/bin/python -m ruff check .
.venv/bin/lint-imports --no-logo
.venv/bin/python -m mypy
# Without compiled files kept on disk, every process of the tests would compile torch and fairseq anew.
unset PYTHONDONTWRITEBYTECODE
# One thread a process: two cores serve two processes better than threads that wait for each other.
export OMP_NUM_THREADS=1
# Files in the order of tests/conftest.py, the longest first, in place of those with most tests first.
exec .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
