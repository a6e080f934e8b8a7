#!/usr/bin/env bash
# Create .venv and install a requirements file into it. Later calls skip what is done.
# usage: tools/setup.sh requirements.txt|requirements-dev.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wanted="$1"
stamp=".venv/.installed-$wanted"
alone="${wanted%.txt}-alone.txt"  # installed without dependencies
[ -f "$alone" ] || alone=/dev/null
sum="$(cat requirements.txt client/requirements.txt "$wanted" "$alone" | cksum)"
if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$sum" ]; then exit 0; fi
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "error: '$python' is not Python >= 3.10 with venv. Install one (Debian: apt install python3-venv) or set PYTHON=" >&2
  exit 1
fi
if [ ! -x .venv/bin/python ]; then
  echo "first use: creating .venv" >&2
  "$python" -m venv .venv
fi
echo "first use: installing $wanted into .venv (PyTorch is large)" >&2
pip=(.venv/bin/python -m pip install --disable-pip-version-check -q)
if ! "${pip[@]}" -r "$wanted" >&2 || { [ -s "$alone" ] && ! "${pip[@]}" --no-deps -r "$alone" >&2; }; then
  echo "error: cannot install $wanted; see above for the reason. Fix it and run the command again" >&2
  exit 1
fi
echo "$sum" > "$stamp"
