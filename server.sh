#!/usr/bin/env bash
# ./server.sh <policy> [flags]: create .venv, install what is missing, and start the server.
# ./server.sh --help lists the policies and the settings. A mock model (--model mock:...) needs no PyTorch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
"$here/tools/setup.sh" requirements.txt "$@"
exec "$here/.venv/bin/python" "$here/app.py" "$@"
