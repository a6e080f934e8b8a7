"""How a full server answers at its door: /health while 64 run and 256 wait, and how soon it is free when all hang up.

    python -m benchmarks.door --model bard --json benchmarks/results/door.json

A real server is filled over raw sockets. The time to the first byte of `/health` is taken again and again, then all
clients go at once, and the time is taken until slots, pages and queue are empty and a probe is answered as before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNNING, WAITING = 64, 256


@contextlib.contextmanager
def served(args: argparse.Namespace) -> Iterator[int]:
    """Run a server on a free port; stop it by its pid."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [args.policy, "--model", args.model, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--compute-threads", str(args.compute_threads), "--access-log", "off"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "app.py"), *argv], stdout=log, stderr=log
        )
        try:
            until(lambda: answers(port), 120)
            yield port
        finally:
            process.terminate()
            process.wait(30)


def answers(port: int) -> bool:
    try:
        return (
            first_byte(port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[1]
            == 200
        )
    except OSError:
        return False


def first_byte(port: int, request: bytes) -> tuple[float, int]:
    """Return the seconds from connecting to the first byte of the answer, and its status."""
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(request)
        head = connection.recv(16)
        took = time.perf_counter() - began
        while connection.recv(65536):
            pass
    return took, int(head.split()[1])


def until(condition: Any, seconds: float) -> float:
    """Return how long it took until `condition()` was true."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > seconds:
            raise SystemExit(f"it did not happen within {seconds:g} s")
        time.sleep(0.005)
    return time.perf_counter() - began


def get(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
        return json.load(reply)


def ask(port: int) -> str:
    body = json.dumps({"prompt": "ROMEO:", "num_tokens": 16, "temperature": 0}).encode()
    url = f"http://127.0.0.1:{port}/inference"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as reply:
        return str(json.load(reply)["completion"])


def fill(port: int) -> list[socket.socket]:
    """Send as many long requests as run and wait at once; return their connections."""
    body = json.dumps({"prompt": "ROMEO:", "num_tokens": 1000}).encode()
    head = f"POST /inference HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    connections = []
    for _ in range(RUNNING + WAITING):
        connection = socket.create_connection(("127.0.0.1", port), 30)
        connection.sendall(head + body)
        connections.append(connection)
    return connections


def is_empty(port: int) -> bool:
    stats = get(port, "/stats")
    return not (
        stats["requests-running"]
        or stats["requests-waiting"]
        or stats["engine"]["kv"]["pages_used"]
    )


def measure(port: int, times: int) -> dict[str, Any]:
    before = ask(port)
    connections = fill(port)
    until(lambda: get(port, "/stats")["requests-waiting"] >= WAITING - 8, 60)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    taken = sorted(first_byte(port, request)[0] for _ in range(times))
    stats = get(port, "/stats")
    for connection in connections:
        connection.close()
    emptied = until(lambda: is_empty(port), 60)
    return {
        "running": stats["requests-running"], "waiting": stats["requests-waiting"],
        "health_p50_ms": 1e3 * taken[times // 2], "health_p99_ms": 1e3 * taken[times * 99 // 100],
        "health_max_ms": 1e3 * taken[-1], "emptied_s": emptied, "same_answer": ask(port) == before,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="dynamic")
    parser.add_argument("--model", default="bard")
    parser.add_argument("--compute-threads", type=int, default=0)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with served(args) as port:
        result = measure(port, args.times)
    print(json.dumps(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
