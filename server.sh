#!/usr/bin/env bash
# ./server.sh <policy or model> [flags]: create .venv, install what is missing, and start the server.
# ./server.sh --help lists the policies and the settings. A mock model (--model mock:...) needs no PyTorch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ "${1:-}" = doctor ]; then
  for word in "$@"; do
    case "$word" in -h | --help)
      [ -n "${_EB_CALLED:-}" ] && serve="./eb serve" doctor="./eb doctor" || serve=./server.sh doctor="./server.sh doctor"
      echo "usage: $doctor [POLICY|MODEL] [OPTIONS]

Check that this machine has what a server with these settings needs: Python,
PyTorch, GPU, device, compiler, disk, open files, port, weights and tokenizer.
Each has a line, with the remedy for what is missing. On a GPU each fast part is
tried, and tokens per second are measured with random weights. The check starts
no server and downloads no model, but its first use installs the packages of
the server.

Policy and options are those of the server ($serve --help). For example:

  $doctor
  $doctor dynamic --model smollm2 --port 8600

exit codes:
  0  the server can start
  1  something is missing
  2  usage error"
      exit ;;
    esac
  done
fi
[ -n "${EB_PYTHON:-}" ] || "$here/dev/tools/setup.sh" server "$@"
exec "${EB_PYTHON:-$here/.venv/bin/python}" "$here/app.py" "$@"
