"""vLLM's own scheduler, in an environment of its own: it and the policies in it keep the laws, without a model and with one."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.support import ROOT

PYTHON = ROOT / ".venv-vllm/bin/python"


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: run dev/tools/setup_vllm.sh")
@pytest.mark.parametrize(("script", "number"), [("try_vllm", 20), ("mixed_vllm", 1000)])
def test_vllm_and_the_policies_in_it_lose_no_request_and_no_block(script: str, number: int) -> None:
    command = [str(PYTHON), "-m", f"tests.engines.{script}", str(number)]
    own = {
        "PYTHONPATH": str(ROOT),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]


@pytest.mark.full
@pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: run dev/tools/setup_vllm.sh")
def test_vllm_breaks_only_the_law_that_the_documentation_names() -> None:
    command = [str(PYTHON), "-m", "integrations.vllm", "check", "--cases", "5"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    kinds = [line for line in result.stdout.splitlines() if line.endswith(" the laws")]
    laws = [line for line in result.stdout.splitlines() if re.match("  [a-z]", line)]
    assert len(kinds) == 8, result.stderr
    assert all("in a step that preempts" in line for line in laws), laws
