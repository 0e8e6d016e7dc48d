#!/usr/bin/env bash
# Lint and tests, in the environment of scripts/quickstart.sh with the dev extras.
# Usage: scripts/test.sh [pytest options], for example scripts/test.sh --slow -k cells.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/install.sh dev
.venv/bin/python -m ruff check .
exec .venv/bin/python -m pytest "$@"
