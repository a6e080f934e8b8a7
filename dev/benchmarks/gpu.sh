#!/usr/bin/env bash
# Check and measure the engine on this machine's GPU, in nine minutes, after which the rest (peers last) gives way;
# without one, run it all at small sizes.
# dev/benchmarks/gpu.sh --json dev/benchmarks/results/gpu.json ; dev/benchmarks/gpu.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=.venv/bin/python
if ! dev/tools/setup.sh dev; then
  python="${PYTHON:-python3}"  # a machine without a network may have all that it takes
  echo "going on with $python and what is installed for it" >&2
fi
exec "$python" -m dev.benchmarks.gpu "$@"
