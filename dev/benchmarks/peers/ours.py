"""This project, measured as its peers are: a server over HTTP, and offline in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from dev.benchmarks.peers.peer import ROOT, Job, OfflinePeer, Order, Peer, Requests, Serve, ServerPeer, answer

NAME = "effective-batching"


class Ours(ServerPeer):
    """The server with the dynamic policy; `format` is one of dev/benchmarks/quality/formats.py."""

    name = NAME
    install = "./server.sh"
    formats = ("bfloat16",)
    ready = "/ready"
    client_flags = ()

    def command(self, port: int) -> list[str]:
        from dev.benchmarks.quality import formats

        options = [f"--{key.replace('_', '-')}={value}" for key, value in formats.settings(self.format).items()]
        return [
            str(self.program), str(ROOT / "app.py"), "dynamic", "--model", self.job.model, *options,
            "--max-batch-size", str(self.job.slots), "--speculate", "off", "--compute-threads", str(self.job.threads),
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip


class OursOffline(OfflinePeer):
    """The engine without a server."""

    name = NAME
    install = Ours.install
    formats = Ours.formats
    module = "dev.benchmarks.peers.ours"

    def model(self) -> str:
        return self.job.model


def programs(format: str, job: Job) -> dict[str, Peer]:
    """Return both ways to run this project, by `how`."""
    program = Path(sys.executable)
    return {"HTTP": Ours(program, format, job), "offline": OursOffline(program, format, job)}


def load(order: Order) -> Serve:
    """Return what answers requests by the scheduler and the engine. The model is what --model means."""
    from dev.benchmarks import offline
    from dev.benchmarks.quality import formats
    from generate.params import GREEDY
    from scheduling.sequence import Sequence

    engine = formats.load(order.format, order.model, threads=order.threads)
    runner = formats.runner_of(engine)

    def serve(requests: Requests) -> int:
        sequences = [Sequence(engine.tokenizer.encode(prompt), n, sampling=GREEDY) for prompt, n in requests]
        offline.serve(runner, sequences, "dynamic", order.slots, tokens_per_step=256)
        return sum(len(seq.output_ids) for seq in sequences)

    return serve


if __name__ == "__main__":
    answer(load)
