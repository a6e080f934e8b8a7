#!/usr/bin/env bash
# ./test.sh [--all | --soak MINUTES] [pytest arguments]: sets itself up like server.sh, then lint, types and tests.
# --all also runs what takes too long for every change, --soak nothing but the random mix of clients. At the end it says
# which tests were skipped and what they need; with --no-skips that is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools/setup.sh requirements-dev.txt
if [ "${1:-}" = --soak ]; then
  minutes="${2:?error: --soak needs a number of minutes. Use ./test.sh --soak 10}"
  exec .venv/bin/python -m pytest -s -m soak tests/faults/test_soak.py --soak-minutes "$minutes" "${@:3}"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
chosen=()
if [ "${1:-}" = --all ]; then
  shift
  chosen=(-m "not soak")
fi
# A worker for each core.
exec .venv/bin/python -m pytest -n auto --dist worksteal "${chosen[@]}" "$@"
