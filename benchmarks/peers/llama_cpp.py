"""llama.cpp's server, on a GGUF file, whose format is its own."""

from __future__ import annotations

from benchmarks.peers.peer import NotMeasured, ServerPeer


class LlamaCpp(ServerPeer):
    """`program` is llama-server."""

    name = "llama.cpp"
    install = "build the target llama-server of llama.cpp with cmake; --peer llama.cpp=build/bin/llama-server"
    formats = ("gguf",)

    def prepare(self) -> None:
        if self.job.gguf is None:
            raise NotMeasured("needs a GGUF file of the same model. Set --gguf")

    def command(self, port: int) -> list[str]:
        threads = ["--threads", str(self.job.threads)] if self.job.threads else []
        context = self.job.slots * self.job.context  # it gives each slot an equal share
        return [
            str(self.program), "--model", str(self.job.gguf), "--parallel", str(self.job.slots),
            "--ctx-size", str(context), *threads, "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
