"""What a peer is: another way to serve the same checkpoint, over HTTP or in a process of its own.

A peer has its own environment, so its file is also run by another Python: this module and theirs import the standard
library alone. It must not know how a peer is measured.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[3]
Requests = list[tuple[str, int]]  # prompt and number of tokens to answer
Serve = Callable[[Requests], int]  # answers requests that arrive at once; returns the number of tokens


class NotMeasured(Exception):
    """A peer that cannot run here; the message is the reason, with a remedy."""


@dataclass(frozen=True)
class Job:
    """What all serve. folder: a checkpoint as transformers stores it. work: a folder for converted models and logs."""

    model: str
    folder: Path | None
    gguf: Path | None
    work: Path
    slots: int
    context: int
    threads: int

    def checkpoint(self) -> Path:
        """Return the folder. NotMeasured where there is none."""
        if self.folder is None:
            raise NotMeasured("needs a folder with config.json, safetensors and tokenizer.json. Set --folder")
        return self.folder


@dataclass(frozen=True)
class Peer(ABC):
    """A program that serves a job in one of its formats."""

    program: Path
    format: str
    job: Job

    name: ClassVar[str]
    install: ClassVar[str]  # how a user gets the program
    formats: ClassVar[tuple[str, ...]]  # the first is the default
    how: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.name} {self.format}"

    def environment(self) -> dict[str, str]:
        """Return variables to set."""
        return {"OMP_NUM_THREADS": str(self.job.threads)} if self.job.threads else {}

    def prepare(self) -> None:  # noqa: B027
        """Convert the model where the peer needs that. NotMeasured where it cannot be done."""


class ServerPeer(Peer):
    """Serves over HTTP."""

    how = "HTTP"
    ready: ClassVar[str] = "/health"  # this path has status 200 when the server is ready
    client_flags: ClassVar[tuple[str, ...]] = ("--api", "openai", "--model", "m")

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Return the command of a server on this loopback port."""


class OfflinePeer(Peer):
    """Has no server: its own Python runs its file here, which calls `answer`."""

    how = "offline"
    module: ClassVar[str]

    def model(self) -> str:
        """Return what the process loads."""
        return str(self.job.checkpoint())

    def command(self, order: Path, result: Path) -> list[str]:
        """Return the command that does what the file `order` says and writes the rates to `result`."""
        return [str(self.program), "-m", self.module, str(order), str(result)]


@dataclass(frozen=True)
class Order:
    """What a process of a peer measures. burst: all at once. single: one after the other."""

    model: str
    format: str
    burst: Requests
    single: Requests
    repeats: int
    slots: int
    threads: int
    context: int

    def write(self, path: Path) -> None:
        """Write it for `answer`."""
        path.write_text(json.dumps(asdict(self)))


def answer(load: Callable[[Order], Serve]) -> None:
    """Measure the order in the file that is the first argument; write tokens per second to that of the second."""
    raw: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    order = Order(**raw)
    serve = load(order)
    serve([(prompt, 8) for prompt, _ in order.burst])  # compiles, and touches memory
    rates: dict[str, list[float]] = {"burst": [], "stream": []}
    for _ in range(order.repeats):
        began = time.perf_counter()
        tokens = serve(order.burst)
        rates["burst"].append(tokens / (time.perf_counter() - began))
    for _ in range(order.repeats):
        began = time.perf_counter()
        tokens = sum(serve([request]) for request in order.single)
        rates["stream"].append(tokens / (time.perf_counter() - began))
    Path(sys.argv[2]).write_text(json.dumps(rates))
