#!/usr/bin/env bash
# Makes .venv beside this repository and installs the package into it, once for every change of the
# files that say what to install. Usage: scripts/install.sh [extra], for example scripts/install.sh dev (default: all).
# PYTHON names the interpreter that makes the environment (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-all}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) is too old, rhhn_fairseq needs Python 3.11 or newer; PYTHON=/path/to/python3.11 names another" >&2
    exit 1
}
stamp=".venv/.installed-$extra"
wanted="$(cat setup.cfg setup.py pyproject.toml constraints.txt rhhn_fairseq/ops/native/*.{cpp,h} | cksum) ${RHHN_NATIVE:-}"
stamps=("$stamp")
# What is for developers has all that the default has, but not what the site of the documentation or export needs.
[ "$extra" != all ] || stamps+=(.venv/.installed-dev)
for done in "${stamps[@]}"; do
    if [ -f "$done" ] && [ "$(cat "$done")" = "$wanted" ]; then
        exit 0
    fi
done
command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || {
    echo "error: no C++ compiler found (c++, g++ or clang++); fairseq needs one to install" >&2
    exit 1
}
# Without Debian's python3-venv, venv leaves an environment without pip.
.venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv .venv

# pip splits PIP_CONSTRAINT at spaces, so that the path of the repository cannot be in it.
export PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
# Python compiles a module when it is first imported; compiling all of them now takes a minute.
pip() {
    .venv/bin/python -m pip "$@" --quiet --no-compile
}
step() {
    echo "$(date +%T) $1"
}
step "fetching torch, into $PWD/.venv"
pip install --upgrade pip
pip install torch numpy Cython setuptools wheel
# fairseq-fixed comes as source. It builds against the torch that is there, without debugging information; in an
# environment of its own it would fetch torch again. With small headers its extensions compile in less than half the
# time. They are copied because flags are split at spaces. Where they do not suffice, torch's own are used.
step "compiling fairseq"
headers=$(mktemp -d)
trap 'rm -rf "$headers"' EXIT
cp -r scripts/headers/. "$headers"
fairseq() {
    CFLAGS="-g0 -O1 $*" pip install --no-build-isolation fairseq-fixed==0.12.3.1
}
fairseq -DAT_PER_OPERATOR_HEADERS "-I$headers" || fairseq
step "compiling this package's kernels, and fetching what it needs"
pip install --no-build-isolation --editable ".[$extra]"
printf '%s\n' "$wanted" > "$stamp"
