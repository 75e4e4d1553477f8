#!/usr/bin/env bash
# Run the tests with named releases, in a fresh virtual environment:
#   tests/releases.sh DEEPSPEED TORCH PYTHON [arguments of pytest...]
#   tests/releases.sh 0.19.6 2.8.0 python3.10
#   tests/releases.sh 0.18.9 2.13.0 python3.11 tests/process_groups
# .github/CONTRIBUTING.md lists the combinations that a change must pass.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 3 ] || { sed -n '2,6s/^# //p' "$0"; exit 2; }
deepspeed=$1 torch=$2 python=$3
shift 3

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu PIP_DISABLE_PIP_VERSION_CHECK=1
export TORCH_EXTENSIONS_DIR="$environment/torch_extensions" # what DeepSpeed compiles must match torch
unset PYTHONDONTWRITEBYTECODE # else each of the tests' processes compiles the package anew
"$python" -m venv "$environment"
# shellcheck disable=SC1091
source "$environment/bin/activate"
pip install -q --no-cache-dir "torch==$torch" "deepspeed==$deepspeed" -e ".[test]"
python -c 'import sys, torch, deepspeed; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}")'
# compile what DeepSpeed needs on CPUs now: a test's own deadline is shorter
python -c 'from deepspeed.ops.op_builder import ShareMemCommBuilder; ShareMemCommBuilder().load()' >/dev/null
pytest -m "not exhaustive" "$@"
