#!/usr/bin/env bash
# ./test.sh [pytest arguments]: sets itself up like server.sh, then lint, types and tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools/setup.sh requirements-dev.txt
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# A worker for each core.
exec .venv/bin/python -m pytest -n auto --dist worksteal "$@"
