#!/usr/bin/env bash
# Trains with fairseq-train in several workers; --help says how. docs/training_many.md says more.
set -euo pipefail

usage() {
    cat <<'EOF'
Trains with fairseq-train in several workers on one machine or many, and starts again after a failure.

Usage: scripts/train_torchrun.sh [option...] [--] DATA --save-dir DIR [option of fairseq-train...]

One machine, all its GPUs:    scripts/train_torchrun.sh data-bin/x --save-dir checkpoints/x ...
One machine, 4 CPU workers:   scripts/train_torchrun.sh --nproc 4 data-bin/x --save-dir checkpoints/x --cpu ...
Two machines, on each:        scripts/train_torchrun.sh --nnodes 2 --rdzv-endpoint first.host:29400 data-bin/x ...
SLURM, one task a node:       srun --ntasks-per-node=1 scripts/train_torchrun.sh data-bin/x ...

Options, before those of fairseq-train; each is an environment variable as well:
  --nproc N                  NPROC          workers on this machine (default: its GPUs)
  --nnodes N or MIN:MAX      NNODES         machines (default: 1, under srun those of the step)
  --rdzv-endpoint HOST:PORT  RDZV_ENDPOINT  where the machines meet: one of them, the same for all
  --rdzv-id NAME             RDZV_ID        tells jobs that meet at one place apart (default: rhhn_fairseq)
  --max-restarts N           MAX_RESTARTS   how often all workers start again after one has failed (default: 3)
  --dry-run                                 print the command instead of running it
  --help                                    print this

Every start goes on from checkpoint_last.pt in --save-dir, if it is there; how much is lost depends on
--save-interval-updates. OMP_NUM_THREADS is, unless set, this machine's cores divided by its workers. PYTHON
names the interpreter; --user-dir need not be given.
EOF
}

fail() {
    echo "error: $*" >&2
    exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3

nproc=${NPROC:-}
nnodes=${NNODES:-${SLURM_STEP_NUM_NODES:-1}}
endpoint=${RDZV_ENDPOINT:-}
job=${RDZV_ID:-${SLURM_JOB_ID:-rhhn_fairseq}}
restarts=${MAX_RESTARTS:-3}
dry_run=

own_options=(--nproc --nnodes --rdzv-endpoint --rdzv-id --max-restarts --dry-run)
while [ $# -gt 0 ]; do
    case $1 in
        --nproc=* | --nnodes=* | --rdzv-endpoint=* | --rdzv-id=* | --max-restarts=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            ;;
        --nproc | --nnodes | --rdzv-endpoint | --rdzv-id | --max-restarts)
            [ $# -gt 1 ] || fail "$1 needs a value"
            case $1 in
                --nproc) nproc=$2 ;;
                --nnodes) nnodes=$2 ;;
                --rdzv-endpoint) endpoint=$2 ;;
                --rdzv-id) job=$2 ;;
                --max-restarts) restarts=$2 ;;
            esac
            shift 2
            ;;
        --dry-run) dry_run=yes; shift ;;
        --help | -h) usage; exit 0 ;;
        --) shift; break ;;
        *) break ;;
    esac
done

# Whether an option of fairseq-train is given, as "--option value" or "--option=value". fairseq accepts no
# abbreviations, so its full name is all there is to look for.
arguments=("$@")
given() {
    local argument
    for argument in "${arguments[@]}"; do
        case $argument in "$1" | "$1="*) return 0 ;; esac
    done
    return 1
}

[ $# -gt 0 ] || fail "name a data directory and the options of fairseq-train, see --help"
for option in "${own_options[@]}"; do
    ! given "$option" || fail "$option is an option of this script: give it before the data directory and the options of fairseq-train"
done
[[ $nnodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "--nnodes $nnodes is not a number of machines, or two as in 2:4"
[[ $restarts =~ ^[0-9]+$ ]] || fail "--max-restarts $restarts is not a number, the smallest is 0"
given --save-dir || fail "--save-dir is missing; without it this run would resume, and overwrite, whatever was trained before in fairseq's default directory"
if [ "$restarts" -gt 0 ]; then
    for option in --restore-file --reset-optimizer --reset-lr-scheduler --reset-meters --reset-dataloader; do
        ! given "$option" || fail "$option would apply to every restart, which then would not go on from the last checkpoint: leave it out, use --finetune-from-model, or pass --max-restarts 0"
    done
    for option in --no-save --no-last-checkpoints; do
        ! given "$option" || fail "$option leaves no last checkpoint that a restart could go on from: leave it out, or pass --max-restarts 0"
    done
fi

if [ -z "$nproc" ]; then
    ! given --cpu || fail "--cpu needs the number of workers: --nproc N"
    nproc=$("$python" -c 'import torch; print(torch.cuda.device_count())')
    [ "$nproc" != 0 ] || [ -z "$dry_run" ] || { echo "no GPU here: the command for one worker" >&2; nproc=1; }
    [ "$nproc" != 0 ] || fail "there is no GPU here; for workers on the CPU pass --nproc N"
fi
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "--nproc $nproc is not a number of workers, the smallest is 1"

if [ "$nnodes" = 1 ]; then
    # Workers of one machine meet at a free port of its own. Its name may not resolve, localhost does.
    meeting=(--standalone --local-addr localhost)
else
    if [ -n "${SLURM_STEP_NODELIST:-}" ]; then
        [ "${SLURM_STEP_NUM_TASKS:-}" = "${SLURM_STEP_NUM_NODES:-}" ] ||
            fail "srun started ${SLURM_STEP_NUM_TASKS:-?} tasks on ${SLURM_STEP_NUM_NODES:-?} nodes, one a node is right: srun --ntasks-per-node=1"
        if [ -z "$endpoint" ]; then
            hosts=$(scontrol show hostnames "$SLURM_STEP_NODELIST")
            # Jobs that share a node need ports of their own.
            endpoint=${hosts%%$'\n'*}:$((29400 + SLURM_JOB_ID % 1000))
        fi
    fi
    [ -n "$endpoint" ] || fail "--nnodes $nnodes needs --rdzv-endpoint HOST:PORT, one of the machines, the same for all"
    meeting=(--nnodes "$nnodes" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$job")
    # A machine's own name may lead to itself alone (127.0.1.1). The others are told the address that it has on
    # the way to the endpoint, and gloo listens there.
    reach=$("$python" -P "$root/scripts/network.py" "$endpoint")
    read -r address interface role <<<"$reach"
    [ "$address" = - ] || meeting+=(--local-addr "$address")
    [ "$role" = - ] || meeting+=(--rdzv-conf is_host=1)
    [ "$interface" = - ] || export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
fi

# By default the machines' agents keep one store for the addresses of the workers for as long as they live.
# After a restart gloo's workers then find the addresses of those that have died, and wait for them in vain
# until the restarts are used up. This gives every start a store of its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# SLURM announces the end of a job to all its processes (--signal=USR1@60). torchrun alone would die of that signal
# before its workers have saved.
export PET_SIGNALS_TO_HANDLE=${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=$((cores > nproc ? cores / nproc : 1))
fi
given --user-dir || set -- "$@" --user-dir "$root/rhhn_fairseq"
command=("$python" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "$nproc")
command+=(--max-restarts "$restarts" -m fairseq_cli.train "$@")
if [ -n "$dry_run" ]; then
    echo "OMP_NUM_THREADS=$OMP_NUM_THREADS$(printf ' %q' "${command[@]}")"
else
    exec "${command[@]}"
fi
