#!/usr/bin/env bash
# From nothing to a trained character model, on one screen: installs into .venv, trains a small LN HyperLSTM
# and an LSTM on the source of Python's standard library, and shows what they have learnt. What is there is
# used again. Usage: scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
log=checkpoints/quickstart/details.log
mkdir -p "$(dirname "$log")"

echo "rhhn_fairseq: a first run, some five and a half minutes the first time"
echo "install   into .venv, some three minutes the first time (log: $log)"
: >"$log"
if ! bash scripts/install.sh all 2>>"$log" | sed -u 's/^/          /'; then
    tail -n 12 "$log" >&2
    echo "error: the installation failed, see $log" >&2
    exit 1
fi
# These models are so small that one thread trains them as fast as several do, and on a busy machine faster.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m rhhn_fairseq quickstart --log "$log"
