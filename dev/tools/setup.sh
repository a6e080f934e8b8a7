#!/usr/bin/env bash
# Create .venv and install what a part of the project needs. Later calls skip what is done.
# usage: dev/tools/setup.sh client|mock|server|ray|dev [the server's arguments]
# Where the arguments start a server without weights, `mock` takes the place of `server`; where they only ask for help, that of
# `ray`, too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cpu_builds=https://download.pytorch.org/whl/cpu  # of PyTorch, by its authors
wanted="$1"
shift

# Whether a command with these arguments only prints something.
only_prints() {
  local word
  for word in "$@"; do
    case "$word" in -h | --help | --version | --print-config) return 0 ;; esac
  done
  return 1
}

# Whether the server with these arguments has no weights. As for the server, a flag wins over the variable, and that over
# .env; a demonstration and the lab have none unless a model is named.
is_without_weights() {
  local model="${EB_MODEL:-}" demo=
  if [ -z "$model" ] && [ -f .env ]; then model="$(sed -n 's/^EB_MODEL=[^a-zA-Z]*//p' .env)"; fi
  if [ "${1:-}" = demo ]; then demo=yes; fi
  while [ $# -gt 0 ]; do
    case "$1" in
      --demo | --lab) [ "${2:-}" = off ] || demo=yes ;;
      --model) model="${2:-}" ;;
      --model=*) model="${1#--model=}" ;;
      # The name of a model in the place of the policy.
      gpt2 | gpt2-medium | gpt2-large | gpt2-xl | distilgpt2 | smollm2 | bard | mock:*) model="$1" ;;
    esac
    shift
  done
  [ "${model#mock:}" != "$model" ] || { [ "$demo" ] && [ -z "$model" ]; }
}

# Whether the ordinary index would bring CUDA, some gigabytes, which nothing here can use. Only Linux gets it from there.
# An index of the user's own is respected: then no other is asked.
takes_cpu_build() {
  [ "$(uname -s)" = Linux ] || return 1
  if command -v nvidia-smi > /dev/null || [ -e /proc/driver/nvidia/version ]; then return 1; fi
  ! .venv/bin/python -m pip config list 2> /dev/null | grep -E '(index-url|no-index|find-links)=' > /dev/null
}

listed() {  # a list of pyproject.toml, a line each
  sed -n "/^$1 = \[/,/^\]/s/^ *\"\(.*\)\",\$/\1/p" pyproject.toml
}

needs() {
  case "$1" in
    client) cat client/requirements.txt ;;
    mock) listed dependencies ;;
    server) needs mock && listed torch ;;
    dev) needs server && listed dev ;;
    *) listed "$1" ;;
  esac
}

case "$wanted" in server | ray) ! only_prints "$@" || wanted=mock ;; esac
if [ "$wanted" = server ] && is_without_weights "$@"; then wanted=mock; fi
with_torch=yes
case "$wanted" in client | mock | ray) with_torch= ;; esac
case "$wanted" in  # each of these includes the one before it
  client) enough="dev server mock client" ;;
  mock) enough="dev server mock" ;;
  server) enough="dev server" ;;
  *) enough="$wanted" ;;
esac
sum="$({ sed -n '/^dependencies/,/^.tool/p' pyproject.toml && cat client/requirements.txt; } | cksum)"
for name in $enough; do
  stamp=".venv/.installed-$name"
  if [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$sum" ]; then exit 0; fi
done

if [ "$with_torch" ] && [ "$(uname -sm)" = "Darwin x86_64" ]; then
  echo "error: PyTorch has no build for Macs with Intel processors. Use --model mock:llm-mock, which needs none" >&2
  exit 1
fi
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "error: '$python' is not Python >= 3.10 with venv. Install one (Debian: apt install python3-venv) or set PYTHON=" >&2
  exit 1
fi
folder="$PWD"
if [ -d .venv ]; then folder="$PWD/.venv"; fi
if [ ! -w "$folder" ]; then  # venv and pip take many lines to say so
  echo "error: cannot install what '$wanted' needs: this user cannot write to $folder. Run the command once as the owner of that" \
    "folder, or copy the project to one of your own" >&2
  exit 1
fi
if [ ! -x .venv/bin/python ]; then
  echo "first use: creating .venv" >&2
  "$python" -m venv .venv
fi
install=(.venv/bin/python -m pip install --disable-pip-version-check -q)
cpu_build= size="PyTorch is large"
if [ "$wanted" = ray ]; then
  size="about 0.2 GB"
elif [ -z "$with_torch" ]; then
  size="about 0.1 GB"
elif takes_cpu_build; then
  cpu_build="$(listed torch)" size="about 0.3 GB, with PyTorch's CPU build"
fi
echo "first use: installing what '$wanted' needs into .venv ($size)" >&2
if [ "$cpu_build" ]; then
  # Only this package comes from there, and what it needs from the ordinary index.
  "${install[@]}" --no-deps --index-url "$cpu_builds" --timeout 10 --retries 1 "$cpu_build" >&2 ||
    echo "warning: cannot get the CPU build of PyTorch. The build with CUDA takes its place, which is larger" >&2
fi
needs "$wanted" > ".venv/$wanted.txt"
if ! "${install[@]}" -r ".venv/$wanted.txt" >&2 ||
  # text-generation pins huggingface_hub < 1, which nothing it calls needs.
  { [ "$wanted" = dev ] && ! "${install[@]}" --no-deps text-generation==0.7.0 >&2; }; then
  echo "error: cannot install what '$wanted' needs; see above for the reason. Fix it and run the command again" >&2
  exit 1
fi
echo "$sum" > ".venv/.installed-$wanted"
