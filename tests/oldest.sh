#!/usr/bin/env bash
# The tests with the oldest releases that are supported, in a fresh virtual environment; or with others:
#   tests/oldest.sh [TORCH [DEEPSPEED [PYTHON [arguments of pytest...]]]]
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${1:-2.8.0} deepspeed=${2:-0.19.8} python=${3:-python3}
shift $(($# < 3 ? $# : 3))

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu PIP_DISABLE_PIP_VERSION_CHECK=1
export TORCH_EXTENSIONS_DIR="$environment/torch_extensions" # what DeepSpeed compiles must match torch
"$python" -m venv "$environment"
# shellcheck disable=SC1091
source "$environment/bin/activate"
pip install -q --no-cache-dir "torch==$torch" "deepspeed==$deepspeed" -e ".[test]"
python -c 'import sys, torch, deepspeed; print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}")'
pytest "$@"
