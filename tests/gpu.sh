#!/usr/bin/env bash
# The checks that need a GPU, in a few minutes; see tests/README.md. Options: --list, --only NAME, --rehearse
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 -m tests.gpu "$@"
