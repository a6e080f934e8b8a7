#!/usr/bin/env bash
# dev/tools/setup_clients.sh: create .venv-clients with dev/tools/clients.txt and, where npm is installed, openai's package
# for Node. A later call skips what is done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for_node=openai@6.49.0
sum="$(echo "$for_node" | cat - dev/tools/clients.txt | cksum)"
if [ "$(cat .venv-clients/.installed 2> /dev/null)" = "$sum" ]; then exit 0; fi
echo "first use: installing dev/tools/clients.txt into .venv-clients (about 0.6 GB)" >&2
"${PYTHON:-python3}" -m venv .venv-clients
.venv-clients/bin/python -m pip install --disable-pip-version-check -q -r dev/tools/clients.txt >&2
if [ -n "$(type -P npm)" ]; then
  npm install --prefix .venv-clients --no-save --ignore-scripts --no-audit --no-fund --loglevel=error "$for_node" >&2
fi
echo "$sum" > .venv-clients/.installed
