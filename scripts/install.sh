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

# fairseq-fixed comes as source and builds against torch in an environment of its own. Without a
# constraint there as well, that build would fetch the newest torch: pip up to 25 reads
# PIP_CONSTRAINT for it, newer ones PIP_BUILD_CONSTRAINT.
# pip splits these variables at spaces, so that the path of the repository cannot be in them.
constraints=constraints.txt
export PIP_CONSTRAINT=$constraints PIP_BUILD_CONSTRAINT=$constraints PIP_DISABLE_PIP_VERSION_CHECK=1
echo "installing into $PWD/.venv (fairseq is compiled, about three minutes the first time)"
.venv/bin/python -m pip install --quiet --upgrade pip
.venv/bin/python -m pip install --quiet --quiet --editable ".[$extra]"
printf '%s\n' "$wanted" > "$stamp"
