#!/usr/bin/env bash
# ./test.sh [--all | --soak MINUTES] [pytest arguments]: set up like server.sh, then run lint, types and tests.
# --all also runs what takes too long for every change, and draws more examples. --soak runs only the random mix of clients.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
dev/tools/setup.sh dev
unset PYTHONDONTWRITEBYTECODE  # or each of some hundred processes compiles the same files
case "${1:-}" in
  --soak)
    minutes="${2:?error: --soak needs a number of minutes. Use ./test.sh --soak 10}"
    exec .venv/bin/python -m pytest -s -m soak tests/faults/test_soak.py --soak-minutes "$minutes" \
      -o faulthandler_timeout=0 "${@:3}" ;;
  --all)
    dev/tools/setup.sh ray
    dev/tools/setup_clients.sh || echo "warning: the tests of agents are skipped" >&2
    dev/tools/setup_vllm.sh || echo "warning: the tests of vLLM are skipped" >&2
    if [ -n "$(type -P npm)" ]; then dev/tools/build_lab.sh || echo "warning: the tests of the lab are skipped" >&2; fi
    set -- -m "not soak" --hypothesis-profile full "${@:2}" ;;
esac
status=0
{ .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy; } || status=$?
# Two workers for each core, because many tests wait for servers. The tests of a file run in one worker and share its servers.
# tests/conftest.py orders the files.
# A worker that dies is not replaced: what killed it would kill the next one, too.
.venv/bin/python -m pytest -n "$((2 * $(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)))" \
  --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 20 --durations-min 1 "$@" || status=$?
exit "$status"
