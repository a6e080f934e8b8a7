#!/usr/bin/env python3
"""Record a run of a server as lines of JSON: its description, the arrivals, each step. The live page replays it.

Two servers recorded with the same seed get the same arrivals, and race at /race. With --policy it starts its own server.

usage: dev/tools/record.py static.jsonl --policy static --requests 48 --rate 60
       dev/tools/record.py mine.jsonl http://127.0.0.1:8500 --requests 48
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from client.send.servers import started

PROMPTS = ("ROMEO:", "JULIET:\nO ", "To be, or not to be", "Good morrow, cousin.", "What, ho!", "DUKE OF YORK:\n",
           "First Citizen:\nBefore we proceed any further, hear me speak.\n", "KING RICHARD:\n")  # fmt: skip


def arrivals(count: int, rate: float, low: int, high: int, seed: int) -> list[tuple[float, dict[str, Any]]]:
    """Return (second, body) of each request, with exponential gaps and lengths spread evenly on a log scale."""
    rng = random.Random(seed)
    at = 0.0
    plan = []
    for number in range(count):
        at += rng.expovariate(rate) if rate else 0.0
        tokens = round(low * (high / low) ** rng.random())
        body = {"prompt": rng.choice(PROMPTS), "num_tokens": tokens, "seed": number}
        plan.append((at, body))
    return plan


@contextlib.contextmanager
def server(policy: str, slots: int, model: str = "bard") -> Iterator[str]:
    """Run a server on a free port; yield its address."""
    flags = ("--model", model, "--compute-threads", "1", "--max-batch-size", str(slots), "--speculate", "off",
             "--access-log", "off")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, started(policy, flags, Path(folder) / "log") as (url, _):
        requests.post(f"{url}/inference", json={"prompt": "Warm", "num_tokens": 8}, timeout=60)
        yield url


class Recorder:
    """Read /events of a server into lines, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.lines: list[dict[str, Any]] = []
        self.ready = threading.Event()
        self._answer = requests.get(f"{url}/events?detail=1", stream=True, timeout=60)
        self._answer.raise_for_status()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.ready.wait(10)

    def _read(self) -> None:
        with contextlib.suppress(requests.RequestException, AttributeError, ValueError):
            # None yields lines as they arrive, which the types of requests do not know.
            for line in self._answer.iter_lines(chunk_size=None):  # type: ignore[call-overload]
                if line.startswith(b"data: "):
                    self.lines.append(json.loads(line[6:]))
                    self.ready.set()

    @property
    def left(self) -> int:
        return sum(len(line.get("left", ())) for line in list(self.lines))

    def stop(self) -> None:
        self._answer.close()


def record(url: str, plan: list[tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Send the requests at their times; return the events of the run."""
    recorder = Recorder(url)
    with ThreadPoolExecutor(len(plan)) as pool:
        began = time.monotonic() + 0.2
        for number, (at, body) in enumerate(plan):
            time.sleep(max(0.0, began + at - time.monotonic()))
            headers = {"X-Request-Id": f"r{number:03d}"}
            pool.submit(requests.post, f"{url}/inference", json=body, headers=headers, timeout=600)
    end = time.monotonic() + 10
    while recorder.left < len(plan) and time.monotonic() < end:
        time.sleep(0.05)
    recorder.stop()
    return recorder.lines


def compact(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines with times since the first arrival, to the microsecond, and without facts of this machine."""
    zero = min(line["t"] for line in lines if "t" in line)
    kept = ("policy", "slots", "model", "parameters", "device", "dtype", "context", "version")
    result = []
    for line in lines:
        if "epoch" in line:
            result.append({k: line[k] for k in kept})
            continue
        line = dict(line, t=round(line["t"] - zero, 6))
        if "seconds" in line:
            line["seconds"] = round(line["seconds"], 6)
            steps = line["slot_steps"]
            line["slot_steps"] = {k: round(v, 4) if v % 1 else int(v) for k, v in steps.items()}
        result.append(line)
    return result


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("url", nargs="?", default="http://localhost:8500", help="the server to record without --policy")
    parser.add_argument("--policy", help="start a server with this policy")
    parser.add_argument("--model", default="bard", help="the model of that server")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second, 0: all at once")
    parser.add_argument("--tokens", type=int, nargs=2, default=(6, 90), metavar=("LEAST", "MOST"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    plan = arrivals(args.requests, args.rate, args.tokens[0], args.tokens[1], args.seed)
    with server(args.policy, args.slots, args.model) if args.policy else contextlib.nullcontext(args.url) as url:
        lines = compact(record(url, plan))
    write(args.file, lines)
    print(f"{len(lines)} lines in {args.file}", file=sys.stderr)


if __name__ == "__main__":
    main()
