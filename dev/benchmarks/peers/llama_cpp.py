"""llama.cpp's server, on a GGUF file as it is, or rounded by llama.cpp's own tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dev.benchmarks.peers.peer import NotMeasured, ServerPeer

AS_IT_IS = "gguf"
CONVERT_SECONDS = 600


class LlamaCpp(ServerPeer):
    """`program` is llama-server; llama-quantize is beside it."""

    name = "llama.cpp"
    install = (
        "build llama-server and llama-quantize of llama.cpp with cmake; --peer llama.cpp=build/bin/llama-server@Q4_0"
    )
    formats = (AS_IT_IS, "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M")

    def gguf(self) -> Path:
        """Return the file to serve. NotMeasured where there is none to begin with."""
        if self.job.gguf is None:
            raise NotMeasured("needs a GGUF file of the same model. Set --gguf (convert_hf_to_gguf.py writes one)")
        given = self.job.gguf
        return given if self.format == AS_IT_IS else self.job.work / f"{given.stem}-{self.format}.gguf"

    def prepare(self) -> None:
        file = self.gguf()
        if file.exists():
            return
        part = file.with_suffix(".part")
        command = [
            str(self.program.parent / "llama-quantize"), "--allow-requantize", str(self.job.gguf), str(part), self.format,
        ]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=CONVERT_SECONDS, cwd=self.job.work)
        except (OSError, subprocess.SubprocessError) as error:
            raise NotMeasured(f"cannot convert {self.job.gguf} to {self.format}: {error}") from error
        part.replace(file)

    def command(self, port: int) -> list[str]:
        threads = ["--threads", str(self.job.threads)] if self.job.threads else []
        context = self.job.slots * self.job.context  # it gives each slot an equal share
        return [
            str(self.program), "--model", str(self.gguf()), "--parallel", str(self.job.slots),
            "--ctx-size", str(context), *threads, "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
