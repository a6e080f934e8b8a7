#!/usr/bin/env bash
# Check and measure the engine on this machine's GPU, in nine minutes at most; without one, run it all at small sizes.
# benchmarks/gpu.sh --json benchmarks/results/gpu.json ; benchmarks/gpu.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh requirements-dev.txt
exec .venv/bin/python -m benchmarks.gpu "$@"
