#!/usr/bin/env bash
# Runs the tests that need a GPU and every benchmark there, at the sizes that figures are wanted for.
#
# Usage: bash scripts/measure_gpu.sh DIR [STEP ...]
#
# Every step writes DIR/STEP.txt, benchmarks DIR/STEP.json as well. A step that fails is named at the
# end, and the others go on; a benchmark that fails is run again without Triton's kernels, as STEP-no-triton, and if
# it fails so too without CUDA graphs either, as STEP-plain. Steps, all of them if none is named:
#   tests    what only a GPU can show: Triton's kernels, CUDA graphs, parity
#   gated    LSTM, LN LSTM, HyperLSTM and LN HyperLSTM of 1000 units beside cuDNN's LSTM, with and without graphs
#   highway  RHN and HyperRHN, 7 x 1000/128
#   lm, train, decode, memory   the benchmark's commands of these names, in bfloat16 where they have types
#
# DEVICE=cuda:1 takes another GPU; SMOKE=1 tries the commands out at tiny sizes, also with DEVICE=cpu.
set -uo pipefail
# Python ends of itself where it is interrupted, and this would go on with the next step.
trap 'echo "error: interrupted" >&2; exit 130' INT TERM
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The package need not be installed.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

STEPS=(tests gated highway lm train decode memory)
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-$(command -v python || echo python3)}

usage() {
    echo "usage: bash scripts/measure_gpu.sh DIR [STEP ...], steps: ${STEPS[*]}" >&2
    exit 2
}

# The backends that leave something out: less_of STEP no-triton|plain
less_of() {
    local kinds=(torch_nn,aten reference) graphs=
    [[ $1 == train || $1 == decode ]] && kinds=(aten reference)
    # What a graph holds is no peak, so that memory is measured without them.
    [ "$2" = no-triton ] && [ "$1" != memory ] && graphs=aten+graphs,
    echo "${kinds[0]},$graphs${kinds[1]}"
}

# bench MODULE OPTION ... -- SIZES ...
bench() {
    local what=() sizes=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do what+=("$1"); shift; done
    [ $# -gt 0 ] && sizes=("${@:2}")
    [ "${SMOKE:-0}" = 1 ] && sizes=(--smoke)
    "$PYTHON" -m "benchmarks.${what[0]}" "${what[@]:1}" --device "$DEVICE" --json "$out/$name.json" \
        "${less[@]}" "${sizes[@]}"
}

run_step() {
    local both=(--dtype bfloat16,float32) big=(--hidden 1000 --input 1000 --batch 128)
    local archs=(--archs lstm_gnmt,hyperlstm_gnmt --attention v2 --dtype bfloat16)
    [ "${SMOKE:-0}" = 1 ] && archs=(--archs hyperlstm_gnmt_small --attention v2 --dtype bfloat16)
    local several=()
    "$PYTHON" -c 'import xdist' 2> /dev/null && several=(-n 8)
    case $1 in
        # By name: other files of tests need packages that these do not.
        tests) "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "torch finds no GPU")' &&
            "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/ops/test_{graphs,decoding_graph,backends}.py &&
            # Nearly each of them compiles kernels of its own. Names are printed as they go, in case time ends.
            RHHN_TEST_TRITON=1 "$PYTHON" -m pytest -v "${several[@]}" -p no:cacheprovider tests/ops/test_operations.py -k triton ;;
        gated) bench cells --cells lstm,ln_lstm,hyperlstm,ln_hyperlstm "${both[@]}" -- "${big[@]}" --length 100 ;;
        highway) bench cells --cells rhn,hyperrhn "${both[@]}" -- "${big[@]}" --length 20 ;;
        lm) bench lm --archs lstm_ptb,ln_hyperlstm_ptb --dtype bfloat16 ;;
        train) bench translation --what train "${archs[@]}" -- --vocab-size 32000 --sentences 128 --length 32 ;;
        decode) bench translation --what decode "${archs[@]}" --beam 4 -- --vocab-size 32000 ;;
        memory) bench memory --cells ln_hyperlstm --dtype bfloat16 -- "${big[@]}" ;;
    esac
}

[[ $# -ge 1 && $1 != -* ]] || usage
[[ $1 == /* ]] && out=$1 || out=$called_from/$1
shift
[ $# -ge 1 ] || set -- "${STEPS[@]}"
for step in "$@"; do
    [[ " ${STEPS[*]} " == *" $step "* ]] || { echo "error: step $step is unknown" >&2; usage; }
done
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)

# attempt NAME OPTION ...: the step, with these options as well, into files of that name
attempt() {
    local name=$1 less=("${@:2}")
    echo "== $name"
    # What an earlier run has left is none of this one's.
    rm -f "$out/$name".{txt,json}
    run_step "$step" 2>&1 | tee "$out/$name.txt"
}

failed=()
for step in "$@"; do
    attempt "$step" && continue
    failed+=("$step")
    [ "$step" = tests ] && continue
    for kind in no-triton plain; do
        attempt "$step-$kind" --backends "$(less_of "$step" "$kind")" && break
    done
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "error: these steps failed, see their .txt in $out: ${failed[*]}" >&2
    exit 1
fi
echo "== all figures are in $out"
