#!/usr/bin/env bash
# ./test.sh [--all | --soak MINUTES] [pytest arguments]: set up like server.sh, then run lint, types and tests.
# --all also runs what takes too long for every change, and draws more examples. --soak runs only the random mix of
# clients. The end of the output says which tests were skipped and what they need; with --no-skips that is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
tools/setup.sh requirements-dev.txt
unset PYTHONDONTWRITEBYTECODE  # or each of some hundred processes compiles the same files
if [ "${1:-}" = --soak ]; then
  minutes="${2:?error: --soak needs a number of minutes. Use ./test.sh --soak 10}"
  exec .venv/bin/python -m pytest -s -m soak tests/faults/test_soak.py --soak-minutes "$minutes" "${@:3}"
fi
chosen=()
if [ "${1:-}" = --all ]; then
  shift
  tools/setup.sh requirements-ray.txt
  if [ -n "$(type -P npm)" ]; then tools/build_lab.sh || echo "warning: the tests of the lab are skipped" >&2; fi
  chosen=(-m "not soak" --hypothesis-profile full)
fi

# Lint and types run beside the tests, and their output follows that of the tests.
check() { .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy; }
output="$(mktemp)"
check > "$output" 2>&1 &
checks=$!
trap 'rm -f "$output"' EXIT

# Two workers for each core, because many tests wait for servers; a file's tests run in one worker, the longest files first.
cores="$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)"
status=0
.venv/bin/python -m pytest -n "$((2 * cores))" --dist loadfile --no-loadscope-reorder -o console_output_style=classic ${chosen[@]+"${chosen[@]}"} "$@" || status=$?
checked=0
wait "$checks" || checked=$?
echo "lint and types:"
cat "$output"
if [ "$checked" != 0 ]; then
  echo "error: lint or types failed with status $checked, the reason is above" >&2
fi
exit "$((status != 0 ? status : checked))"
