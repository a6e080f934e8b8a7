"""What the worst bodies cost other clients: gaps in a stream, waits for /health, and the server's memory.

    python -m benchmarks.bodies --json benchmarks/results/bodies.json

The server streams one long answer and is asked for /health all the time. Meanwhile each field of each route is sent
the largest value of every kind: lists, objects, numbers, texts. The table shows for each route the longest wait for
the next event of the stream and for an answer of /health, with the body that caused it. Then eight clients send the
slowest body at once. At last many clients send lists of thousands of wrong items, after which the server should not
have grown.
"""

from __future__ import annotations

import argparse
import copy
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel
from rich.console import Console

from benchmarks import closed_loop, report
from benchmarks.server import Served, call, served

LIMIT = 1 << 20  # bytes of a body
LONG, TRIES = 50.0, 8  # a wait of more ms is measured again: another process may have had the core
MOST_VALUES, MOST_KEYS = 131_000, 16_000  # just fewer than the server reads
CLIENTS = 8
MARK = "@here@"
HEALTH = closed_loop.request("/health")
CLOSE = "Connection: close\r\n"
console = Console(stderr=True)


class Hostile(NamedTuple):
    """A body, and which field of which route has which kind of value."""

    path: str
    field: str
    kind: str
    body: bytes
    method: str = "POST"

    @property
    def name(self) -> str:
        return f"{self.field}: {self.kind}"


def repeated(item: str, room: int, most: int = LIMIT) -> str:
    """Return a list of equal items: as many as fit, or `most`."""
    return "[" + ",".join([item] * min(most, (room - 2) // (len(item) + 1))) + "]"


def keyed(most: int, *last: str) -> Callable[[int], str]:
    """Return a function that writes an object with this many keys, or as many as fit."""
    pairs = (f'"k{i}":1' for i in range(most))
    return lambda room: "{" + ",".join([*pairs, *last])[: room - 2].rpartition(",")[0] + "}"


KINDS: dict[str, Callable[[int], str]] = {
    "ones that fill the body": lambda room: repeated("1", room),
    "many ones": lambda room: repeated("1", room, MOST_VALUES),
    "many negative numbers": lambda room: repeated("-1", room, MOST_VALUES),
    "many fractions": lambda room: repeated("0.5", room, MOST_VALUES),
    "numbers of 4,300 digits": lambda room: repeated("1" * 4300, room),
    "many texts": lambda room: repeated('"ab"', room, MOST_VALUES),
    "many lists": lambda room: repeated("[]", room, MOST_KEYS),
    "lists that fill the body": lambda room: repeated("[]", room),
    "many objects": lambda room: repeated('{"a":1}', room, MOST_KEYS // 2),
    "many keys": lambda room: keyed(MOST_KEYS)(room),
    "a key twice among many": lambda room: keyed(MOST_KEYS, '"k9":1', '"":1')(room),
    "a key twice among 20,000": lambda room: keyed(20_000, '"k19999":1', '"":1')(room),
    "keys that fill the body": lambda room: keyed(LIMIT // 12)(room),
    "brackets": lambda room: "[" * (room // 2) + "]" * (room // 2),
    "a long text": lambda room: '"' + "a" * (room - 2) + '"',
    "a long text of spaces": lambda room: '"' + " " * (room - 2) + '"',
    "a long text of commas and brackets": lambda room: '"' + ",[{" * ((room - 2) // 3) + '"',
    "a long text of escapes": lambda room: '"' + '\\"' * ((room - 2) // 2) + '"',
    "control characters": lambda room: '"' + "\\u0001" * ((room - 2) // 6) + '"',
    "a text of 15,000 bytes": lambda room: '"' + "\\u0001" * 15_000 + '"',
    "a text of 130,000 bytes": lambda room: '"' + "qx" * 65_000 + '"',
    "65,000 ids": lambda room: repeated("199", room, 65_000),
    "64 lists of 1,024 ids": lambda room: repeated(repeated("199", room, 1024), room, 64),
}


def fields_of(operations: Any) -> Iterator[tuple[Any, tuple[str | int, ...]]]:
    """Yield each route that takes a body with the place of each field in it, and with one unknown field."""
    for operation in operations:
        schema = operation.body
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            yield from ((operation, place) for place in [*places(schema), ("unknown",)])


def hostile(operations: Any, routes: tuple[str, ...] = (), kinds: tuple[str, ...] = ()) -> Iterator[Hostile]:
    """Yield for each field of each route the largest body with each kind of value in it."""
    for operation, place in fields_of(operations):
        if routes and operation.path not in routes:
            continue
        marked = json.dumps(put(copy.deepcopy(operation.example), place, MARK))
        for kind in kinds or KINDS:
            value = KINDS[kind](LIMIT - len(marked))
            body = marked.replace(f'"{MARK}"', value).encode()
            field = ".".join(map(str, place))
            yield Hostile(operation.path, field, kind, body, operation.method.upper())


def places(schema: type[BaseModel]) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of a schema's fields, including those of inner objects and of a list's first object."""
    for name, field in schema.model_fields.items():
        yield (name,)
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        if inner:
            first = (0,) if get_origin(field.annotation) is list else ()
            yield from ((name, *first, *place) for place in places(inner[0]))


def put(fields: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """Return an object with a value in a place of it."""
    inner = fields
    for part in place[:-1]:
        inner = inner.setdefault(part, {}) if isinstance(inner, dict) else inner[part]
    inner[place[-1]] = value
    return fields


class Pulse:
    """Streams and asks for /health without end, and keeps the longest wait for each since the last `take`."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.over = threading.Event()
        self.longest = {"stream": 0.0, "health": 0.0}
        self._last = dict.fromkeys(self.longest, time.perf_counter())
        self._threads = [threading.Thread(target=act, daemon=True) for act in (self._stream, self._health)]

    def __enter__(self) -> Pulse:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(30)

    def take(self) -> dict[str, float]:
        """Return the longest waits since the last call in ms, including those that are not over."""
        now = time.perf_counter()
        waits = {name: max(self.longest[name], now - self._last[name]) for name in self.longest}
        self.longest = dict.fromkeys(self.longest, 0.0)
        return {name: 1e3 * seconds for name, seconds in waits.items()}

    def _beat(self, name: str, waited: float) -> None:
        self._last[name] = time.perf_counter()
        self.longest[name] = max(self.longest[name], waited)

    def _stream(self) -> None:
        body = json.dumps({"prompt": "ROMEO:", "num_tokens": 1000, "stream": True}).encode()
        while not self.over.is_set():
            with socket.create_connection(("127.0.0.1", self.port), 60) as sock:
                sock.sendall(closed_loop.request("/inference", body, CLOSE))
                sock.recv(1 << 16)
                self._last["stream"] = time.perf_counter()
                while not self.over.is_set() and sock.recv(1 << 16):
                    self._beat("stream", time.perf_counter() - self._last["stream"])

    def _health(self) -> None:
        with socket.create_connection(("127.0.0.1", self.port), 60) as sock:
            while not self.over.is_set():
                asked = self._last["health"] = time.perf_counter()
                sock.sendall(HEALTH)
                sock.recv(1 << 16)
                self._beat("health", time.perf_counter() - asked)
                time.sleep(0.001)


def send(port: int, body: Hostile) -> tuple[int, int]:
    """Send a body; return the status of its answer and how many bytes that has."""
    with socket.create_connection(("127.0.0.1", port), 120) as sock:
        sock.sendall(closed_loop.request(body.path, body.body, CLOSE, body.method))
        head = sock.recv(1 << 16)
        size = len(head)
        while piece := sock.recv(1 << 16):
            size += len(piece)
    return int(head.split()[1]), size


def operations_of() -> Any:
    """Return what the server says of its routes."""
    import app
    from config import Config

    return app.create_app(Config()).extensions["service"].operations


def measure(server: Served, args: argparse.Namespace) -> dict[str, Any]:
    bodies = hostile(operations_of(), tuple(args.routes), tuple(args.kinds))
    before = server.memory
    with Pulse(server.port) as pulse:
        time.sleep(1)
        pulse.take()
        time.sleep(3)
        idle = pulse.take()
        rows: dict[str, list[dict[str, Any]]] = {}
        slowest, longest = None, 0.0
        for body in bodies:
            cost = cost_of(body, server.port, pulse)
            rows.setdefault(body.path, []).append(cost)
            if cost["seconds"] > longest:
                slowest, longest = body, cost["seconds"]
        assert slowest is not None
        after = server.memory
        pulse.take()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda _: send(server.port, slowest), range(CLIENTS * 3)))
        together = {"path": slowest.path, "name": slowest.name, **pulse.take()}
    return {
        "idle": idle,
        "routes": {path: worst_of(own) for path, own in rows.items()},
        "together": together,
        "memory_before": before,
        "memory_after": after,
        "flood": flood(server, args.flood),
    }


def cost_of(body: Hostile, port: int, pulse: Pulse) -> dict[str, Any]:
    """Send a body, and again while the waits are long; return the shortest ones."""
    waits: dict[str, float] = {}
    for _ in range(TRIES):
        pulse.take()
        began = time.perf_counter()
        status, size = send(port, body)
        found = {"seconds": time.perf_counter() - began, **pulse.take()}
        waits = {name: min(value, waits.get(name, value)) for name, value in found.items()}
        if max(waits["stream"], waits["health"]) <= LONG:
            break
        time.sleep(0.25)
    return {"name": body.name, "status": status, "bytes_out": size, **waits}


def worst_of(costs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the bodies of a route that cost most, by each measure."""
    measures = ("stream", "health", "seconds", "bytes_out")
    return {"bodies": len(costs), **{m: max(costs, key=lambda c: c[m]) for m in measures}}


def flood(server: Served, requests: int) -> dict[str, float]:
    """Send lists of 12,000 wrong items from as many clients as the server has threads; return the MB before and after."""
    fields = {"prompt": "x", "num_tokens": 1, "stop": [1] * 12_000}
    stop = Hostile("/inference", "stop", "wrong items", json.dumps(fields).encode())
    before = server.memory
    total = call(server.port, "GET", "/info")["max_concurrent_requests"] + 32
    with ThreadPoolExecutor(total) as pool:
        list(pool.map(lambda _: send(server.port, stop), range(requests)))
    time.sleep(1)
    return {"requests": requests, "clients": total, "before": before, "after": server.memory}


def show(result: dict[str, Any]) -> None:
    rows = []
    for path, worst in result["routes"].items():
        stream, health = worst["stream"], worst["health"]
        rows.append((
            path, str(worst["bodies"]), f"{stream['stream']:.0f}", stream["name"], f"{health['health']:.0f}",
            health["name"], f"{worst['bytes_out']['bytes_out'] / 1e6:.1f}",
        ))  # fmt: skip
    idle, together, memory = result["idle"], result["together"], result["flood"]
    heads = ("route", "bodies", "stream ms", "by", "/health ms", "by", "answer MB")
    report.show(None, heads, rows, words=["by"])
    console.print(
        f"idle: stream {idle['stream']:.0f} ms, /health {idle['health']:.0f} ms; {CLIENTS} clients with "
        f"{together['path']} {together['name']}: stream {together['stream']:.0f} ms, /health {together['health']:.0f} ms"
    )
    console.print(
        f"memory: {result['memory_before']:.0f} MB before, {result['memory_after']:.0f} MB after all bodies; "
        f"{memory['requests']} short bodies by {memory['clients']} clients: {memory['before']:.0f} to {memory['after']:.0f} MB"
    )


def main() -> None:
    parser = report.parser("bodies", __doc__)
    report.add_server(parser, threads=1)
    parser.add_argument("--routes", nargs="*", default=[], metavar="PATH", help="only these")
    parser.add_argument("--kinds", nargs="*", default=[], choices=list(KINDS), metavar="KIND", help="only these")
    parser.add_argument("--flood", type=int, default=600, help="requests of the last part")
    args = parser.parse_args()
    with served(args, "--access-log", "off") as server:
        result = measure(server, args)
    show(result)
    report.finish("bodies", {"model": args.model, "policy": args.policy, **result}, args.json)


if __name__ == "__main__":
    main()
