"""The server under measurement: it is started on a free port, asked over HTTP, and stopped by its own pid."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from client.send import servers


@contextlib.contextmanager
def started(policy: str, *flags: str) -> Iterator[tuple[int, int]]:
    """Run a server with a policy and these flags; yield its port and the pid of its master."""
    with tempfile.TemporaryDirectory() as folder, servers.started(policy, flags, Path(folder) / "log") as (url, pid):
        yield int(url.rpartition(":")[2]), pid


@contextlib.contextmanager
def served(args: argparse.Namespace, *flags: str) -> Iterator[tuple[int, int]]:
    """Run a server with the options of `report.add_server` and these flags."""
    own = ("--model", args.model, "--compute-threads", str(args.compute_threads))
    with started(args.policy, *own, *flags) as server:
        yield server


def call(port: int, method: str, path: str, body: Any = None, **more: Any) -> Any:
    """Return the answer to a request, read as JSON; `body` is sent as JSON, and `more` goes to `requests`."""
    answer = requests.request(method, f"http://127.0.0.1:{port}{path}", json=body, timeout=600, **more)
    answer.raise_for_status()
    return answer.json()


def until(condition: Callable[[], Any], seconds: float) -> float:
    """Return how long it took until `condition()` was true."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > seconds:
            raise SystemExit(f"it did not happen within {seconds:g} s")
        time.sleep(0.005)
    return time.perf_counter() - began
