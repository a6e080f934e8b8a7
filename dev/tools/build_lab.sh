#!/usr/bin/env bash
# dev/tools/build_lab.sh [FOLDER]: build the lab into build/lab, which ./server.sh --lab serves, or into another folder for any
# static host. Pyodide comes from the npm registry; a later build into the same folder takes what is there.
set -euo pipefail
home="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
folder="${1:-$home/build/lab}"
version=314.0.7  # of Pyodide
"$home/dev/tools/setup.sh" mock
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
if [ "$(cat "$folder/pyodide/version" 2> /dev/null)" != "$version" ]; then
  if ! command -v npm > /dev/null; then
    echo "error: npm is not installed, which gets Pyodide. Install it (Debian: apt install npm) and run this again" >&2
    exit 1
  fi
  fetched="$(mktemp -d)"
  trap 'rm -rf "$fetched"' EXIT
  if ! npm install --prefix "$fetched" --no-save --ignore-scripts --no-audit --no-fund --loglevel=error "pyodide@$version" >&2; then
    echo "error: npm cannot get pyodide@$version; see above for the reason. Fix it and run this again" >&2
    exit 1
  fi
  rm -rf "$folder/pyodide"
  mkdir "$folder/pyodide"
  for file in pyodide.mjs pyodide.asm.mjs pyodide.asm.wasm python_stdlib.zip pyodide-lock.json; do
    cp "$fetched/node_modules/pyodide/$file" "$folder/pyodide/"
  done
  echo "$version" > "$folder/pyodide/version"
fi
"$home/.venv/bin/python" "$home/dev/tools/pack_lab.py" "$folder"
echo "The lab is in $folder ($(du -sh "$folder" | cut -f1)). ./server.sh --lab serves build/lab; any static host serves the folder." >&2
