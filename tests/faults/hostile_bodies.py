"""Bodies that no client needs, each of which makes some part of the server work."""

from __future__ import annotations

import contextlib
import socket
from typing import NamedTuple

from benchmarks import closed_loop
from benchmarks.bodies import KINDS, LIMIT

PATIENCE = 60.0  # seconds for an answer
BODIES = {
    "/inference": '{"prompt":"x","num_tokens":1%s}',
    "/v1/completions": '{"prompt":"x","max_tokens":1%s}',
    "/generate": '{"inputs":"x","parameters":{"max_new_tokens":1%s}}',
    "/v1/chat/completions": '{"max_tokens":1%s}',
    "/tokenize": "{%s}",
    "/detokenize": "{%s}",
}


class Hostile(NamedTuple):
    """A body, and where it goes."""

    path: str
    body: bytes


def hostile() -> list[Hostile]:
    """Return a body of every kind for the routes that read it."""
    many_keys, ones = KINDS["a key twice among 20,000"], KINDS["ones that fill the body"]
    text = '"' + "Now is the winter of our discontent. " * 25_000 + '"'
    extras: list[tuple[str, str]] = [
        *((path, f',"k":{many_keys(LIMIT - 99)}') for path in ("/inference", "/v1/completions", "/generate")),
        *((path, f',"stop":[{",".join(["1"] * (n - 1))},1]')
          for n in (12_000, 500_000) for path in ("/inference", "/v1/completions", "/generate")),
        *((path, f',"temperature":-{n}')
          for n, path in enumerate(("/inference", "/v1/completions", "/generate"), 1)),
        ("/tokenize", f'"prompt":{text}'),
        ("/tokenize", f'"inputs":{text}'),
        ("/v1/completions", f',"logit_bias":{KINDS["many keys"](LIMIT - 99)}'),
        ("/v1/completions", f',"logit_bias":{ones(LIMIT - 99)}'),
        ("/v1/chat/completions", f',"messages":{ones(LIMIT - 99)}'),
        ("/v1/chat/completions", f',"messages":{KINDS["many objects"](LIMIT - 99)}'),
        ("/detokenize", f'"tokens":{ones(LIMIT - 99)}'),
        ("/detokenize", f'"tokens":{KINDS["65,000 ids"](LIMIT - 99)}'),
    ]  # fmt: skip
    return [Hostile(path, (BODIES[path] % extra).encode()) for path, extra in extras]


def send(port: int, body: Hostile) -> int:
    """Send a body on a connection of its own, and read the answer to its end; return its status, 0 if there is none."""
    head = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        sock.sendall(closed_loop.request(body.path, body.body, "Connection: close\r\n"))
        head = sock.recv(1 << 16)
        while sock.recv(1 << 16):
            pass
    return int(head[9:12]) if len(head) > 12 else 0
