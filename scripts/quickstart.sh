#!/usr/bin/env bash
# From nothing to a trained character model: installs into .venv, prepares the standard library's source
# text, trains a small LN HyperLSTM, evaluates it and prints a sample. What is there is used again.
# Usage: scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
data=data-bin/quickstart
run=checkpoints/quickstart

bash scripts/install.sh
export PATH=$PWD/.venv/bin:$PATH
# This model is so small that one thread trains it as fast as several do, and on a busy machine faster.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

echo "== text: the source of this Python's standard library"
python scripts/prepare_chars.py stdlib --size 1000000 --dest "$data"

if [ -f "$run/finished" ]; then
    echo "== training: $run is trained already (remove it to train again)"
else
    echo "== training: about three minutes on two cores"
    fairseq-train "$data" --user-dir rhhn_fairseq \
        --arch char_lm --cell ln_hyperlstm --hidden-size 160 --hyper-size 32 --hyper-embed-size 4 \
        --lr 0.005 --batch-size 32 --tokens-per-sample 50 --max-epoch 2 --save-dir "$run" --log-interval 50
    touch "$run/finished"
fi

echo "== evaluation on text the model has not seen"
fairseq-eval-lm "$data" --user-dir rhhn_fairseq --gen-subset test \
    --path "$run/checkpoint_best.pt" --protocol carry:8 |& tee "$run/test.log" | grep -v "tokens/s"

echo "== the model's own text"
python scripts/sample.py "$run/checkpoint_best.pt" --prompt "def " --length 300 --temperature 0.7
echo "== $(grep -o '[0-9.]* bits per character' "$run/test.log")"
