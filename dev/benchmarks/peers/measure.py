"""Measure one peer: start it, wait until it is ready, send it the load, end it by its pid.

It must not know a single peer, nor what is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from client.data import plan
from client.send import servers
from client.send.servers import free_port, signals_raise
from client.workloads.arrivals import Arrivals
from dev.benchmarks import serving
from dev.benchmarks.peers.peer import ROOT, NotMeasured, OfflinePeer, Order, Peer, Requests, ServerPeer

OFFLINE_SECONDS = 1800.0
# What a log says, and what helps.
REMEDIES = {
    "torchvision::nms": "Its torchvision is of another build than its torch. Run pip uninstall torchvision there",
    "_torchaudio": "Its torchaudio is of another build than its torch. Run pip uninstall torchaudio there",
}
WARM_UP = ("--warmup", "3")
Rates = dict[str, list[float]]  # tokens per second of each repeat: burst all at once, stream one after the other


def measure(peer: Peer, args: argparse.Namespace) -> Rates:
    """Return the rates of a peer. NotMeasured where it cannot run."""
    if not peer.program.is_file():
        raise NotMeasured(f"there is no program {peer.program}. To install: {peer.install}")
    peer.prepare()
    if isinstance(peer, ServerPeer):
        return over_http(peer, args)
    assert isinstance(peer, OfflinePeer)
    return offline(peer, args)


def over_http(peer: ServerPeer, args: argparse.Namespace) -> Rates:
    """Start the server of `peer`, and send both loads with the project's client."""
    port = free_port()
    log = peer.job.work / f"{peer.name}-{peer.format}.log"
    with running(peer.command(port), peer.environment(), log) as process:
        wait_until_ready(f"http://127.0.0.1:{port}{peer.ready}", process, log, args.start_limit)
        return loads(port, peer.client_flags, args)


def loads(port: int, client_flags: Sequence[str], args: argparse.Namespace) -> Rates:
    """Send both loads to the server on `port`. NotMeasured when a request fails."""
    burst = ("--burst", "--numsamples", str(args.slots))
    stream = ("--load", "closed:1", "--numsamples", str(args.single))

    def rate(*flags: str) -> float:
        result: dict[str, Any] = serving.load(port, args, *client_flags, *WARM_UP, *flags)
        return float(result["output_throughput"])

    try:
        return {
            "burst": [rate(*burst) for _ in range(args.repeats)],
            "stream": [rate(*stream) for _ in range(args.repeats)],
        }
    except subprocess.CalledProcessError as error:
        raise NotMeasured(f"the load failed: {last_line(error.stderr)}") from error


def offline(peer: OfflinePeer, args: argparse.Namespace) -> Rates:
    """Let the peer's own Python answer the same requests without HTTP."""
    job = peer.job
    order_file, result = job.work / "order.json", job.work / "rates.json"
    result.unlink(missing_ok=True)
    log = job.work / f"{peer.name}-{peer.format}-offline.log"
    Order(
        model=peer.model(), format=peer.format, burst=requests(args.slots, args.seed),
        single=requests(args.single, args.seed), repeats=args.repeats, slots=args.slots, threads=job.threads,
        context=job.context,
    ).write(order_file)  # fmt: skip
    environment = peer.environment() | {"PYTHONPATH": str(ROOT)}
    with running(peer.command(order_file, result), environment, log) as process:
        try:
            code = process.wait(OFFLINE_SECONDS)
        except subprocess.TimeoutExpired:
            raise NotMeasured(f"took longer than {OFFLINE_SECONDS:.0f} s") from None
    if code or not result.exists():
        raise NotMeasured(f"exit code {code}: {last_line(log.read_bytes())}")
    rates: Rates = json.loads(result.read_text())
    return rates


def requests(count: int, seed: int) -> Requests:
    """Return the client's requests of this seed."""
    return [(planned.prompt, planned.num_tokens) for planned in plan(count, None, "normal", Arrivals("burst"), seed)]


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with its output in `log`; end it, and what it started, after the block."""
    # Its folder is not the repository, whose modules would hide the peer's of the same names.
    inherited = {k: v for k, v in os.environ.items() if k not in ("BATCHING", "PYTHONPATH", "VIRTUAL_ENV")}
    with signals_raise(), log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=log.parent,
            env={**inherited, **environment}, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process; after that, kill what is left of its process group, which is its own."""
    servers.stop(process)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    """Return when `url` answers 200. NotMeasured when the process ends before, or after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise NotMeasured(f"the server ended with code {process.returncode}: {last_line(log.read_bytes())}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise NotMeasured(
        f"the server was not ready after {seconds:.0f} s. Set --start-limit. Its log ends: {last_line(log.read_bytes())}"
    )


def last_line(output: bytes) -> str:
    """Return the last line of a log that names an error, else the last one that says something, and a remedy."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search("error|failed", line, re.IGNORECASE)]
    reason = (errors or lines or ["no output"])[-1][:200]
    return ". ".join([reason, *(remedy for text, remedy in REMEDIES.items() if text in reason)])
