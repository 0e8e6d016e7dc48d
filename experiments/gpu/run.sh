#!/usr/bin/env bash
# A quarter of an hour on a GPU, part by part; each result is written before the next begins.
#
# Usage: bash experiments/gpu/run.sh DIR SECONDS PART ...        parts: tests, candidates, training
#
#   tests        those marked gpu: graphs, backends, beam search, the candidates with streams, and trainings in
#                fp16, amp and bf16 of character models, translation and handwriting (3 minutes at most)
#   candidates   each in a process of its own beside today's code (2 minutes each at most)
#   training     hyperrhn_1000_modern with dropout of 0.25 for the rest; its weights in bfloat16
#
# DIR gets results.jsonl, log.txt and weights.0, weights.1, which cat joins to a checkpoint. fairseq and what it
# needs must be on PYTHONPATH. DATA names a directory with the prepared Penn Treebank, for the training.
# DRY_RUN=1 tries everything out on the CPU at tiny sizes.
set -uo pipefail
[ $# -ge 3 ] || { echo "usage: bash experiments/gpu/run.sh DIR SECONDS PART ..." >&2; exit 2; }
out=$(realpath -m "$1") left=$2 data=${DATA:+$(realpath "$DATA")}
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
PYTHON=${PYTHON:-$(command -v python || echo python3)}
dry=${DRY_RUN:-0}
[ "$dry" = 1 ] && device=cpu || device=cuda
mkdir -p "$out"
end=$((SECONDS + left))

# within LIMIT COMMAND ...: runs it for so many seconds at most, and no longer than there is time
within() {
    local limit=$(($1 < end - SECONDS ? $1 : end - SECONDS))
    [ "$limit" -gt 0 ] || return 124
    timeout -k 5 "$limit" "${@:2}"
}

# note PART STATUS WORDS: a line of results
note() {
    "$PYTHON" -c 'import json, sys; print(json.dumps(dict(zip(("part", "status", "result"), sys.argv[1:]))))' "$@" |
        tee -a "$out/results.jsonl"
}

run_tests() {
    local files=(tests/ops/test_{graphs,decoding_graph,backends}.py tests/experiments/test_gpu_candidates.py)
    local several=() triton= status
    "$PYTHON" -c 'import xdist' 2> /dev/null && [ "$dry" = 0 ] && several=(-n 8)
    if [ "$dry" = 1 ]; then
        files=(tests/experiments/test_gpu_candidates.py -k 'pipeline or search')
    else
        # Beside the others, since nearly each of them compiles kernels of its own.
        RHHN_TEST_TRITON=1 within 180 "$PYTHON" -m pytest -q "${several[@]}" -p no:cacheprovider -k triton \
            tests/ops/test_operations.py > "$out/triton.log" 2>&1 &
        triton=$!
        files+=(-m gpu)
    fi
    within 180 "$PYTHON" -m pytest -q "${several[@]}" -p no:cacheprovider "${files[@]}" > "$out/tests.log" 2>&1
    status=$?
    note tests $status "$(tail -n 15 "$out/tests.log")"
    if [ -n "$triton" ]; then
        wait "$triton"
        status=$?
        note triton $status "$(tail -n 5 "$out/triton.log")"
        cat "$out/triton.log" >> "$out/tests.log"
    fi
    cat "$out/tests.log" >> "$out/log.txt"
    rm -f "$out"/{tests,triton}.log
}

run_candidates() {
    local name status
    for name in decoding two_streams; do
        within 120 "$PYTHON" -m experiments.gpu.measure "$name" "$device" \
            2>> "$out/log.txt" | tee -a "$out/results.jsonl"
        status=$?
        note "$name" $status ""
    done
}

run_training() {
    local scratch words probe=200 rate updates each epoch=199 margin=20 place seen= status
    scratch=$(mktemp -d)
    words=("$data" --batch-size 256)
    if [ "$dry" = 1 ]; then
        "$PYTHON" -c 'import sys, pathlib; from helpers import tiny_char_lm
tiny_char_lm.write_corpus(pathlib.Path(sys.argv[1]))' "$scratch" 2> /dev/null
        words=("$scratch/data" --batch-size 2 --tokens-per-sample 7 --hidden-size 16 --hyper-size 4 --cpu)
        probe=40 epoch=40 margin=15
    fi
    words+=(--user-dir rhhn_fairseq --arch hyperrhn_1000_modern --bf16 --lr 4e-3 --seed 1 --no-epoch-checkpoints
        --recurrent-dropout 0.25 --output-dropout 0.25 --log-format json)
    # Shows the rate and compiles the kernels; then the schedule can fit the time.
    within 120 "$PYTHON" -m fairseq_cli.train "${words[@]}" --log-interval $((probe / 4)) --max-update $probe \
        --disable-validation --no-save --save-dir "$scratch/probe" > "$scratch/log" 2>&1
    status=$?
    cat "$scratch/log" >> "$out/log.txt"
    rate=$(grep -o '"ups": "[0-9.]*"' "$scratch/log" | tr -dc '0-9.\n' | sed 1d | sort -g | tail -n 1)
    note probe $status "${rate:-no} updates per second"
    [ -n "$rate" ] || return 1
    left=$((end - SECONDS - margin))
    # Start, eight validations and as many checkpoints take some 45 seconds.
    updates=$(awk "BEGIN {n = int($rate * ($left - 45) * 0.97); print (n > $epoch ? n : $epoch)}")
    note schedule 0 "$updates updates in $left seconds"
    [ "$dry" = 1 ] && updates=$((2 * epoch))
    each=$((updates / epoch / 8 > 0 ? updates / epoch / 8 : 1)) place=$scratch/run
    within "$left" "$PYTHON" -m fairseq_cli.train "${words[@]}" --total-num-update "$updates" --max-update "$updates" \
        --max-epoch 10000 --validate-interval "$each" --save-interval "$each" --log-interval 200 \
        --save-dir "$place" > "$scratch/log" 2>&1 &
    local training=$!
    while sleep 1; do
        kill -0 $training 2> /dev/null || break
        if [ -e "$place/checkpoint_best.pt" ] && [ "$place/checkpoint_best.pt" -nt "${seen:-/dev/null}" ]; then
            seen=$scratch/seen
            touch "$seen"
            "$PYTHON" -m experiments.gpu.measure pack "$place/checkpoint_best.pt" "$out" >> "$out/log.txt" 2>&1
        fi
    done
    wait $training
    status=$?
    "$PYTHON" -m experiments.gpu.measure pack "$place/checkpoint_best.pt" "$out" >> "$out/log.txt" 2>&1
    cat "$scratch/log" >> "$out/log.txt"
    note training $status "$updates updates of 256 x 100 symbols: $(grep -o '"valid_bpc": "[0-9.]*"' "$scratch/log" | tr '\n' ' ')"
    rm -r "$scratch"
}

for part in "$@"; do
    "run_$part"
done
