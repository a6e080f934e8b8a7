"""What streaming costs: the same burst of requests streamed and not, in turns, against one server.

    python -m benchmarks.streaming --json benchmarks/results/streaming.json
    python -m benchmarks.streaming --model gpt2-medium --load-format dummy --tokens 100

All connections are open before the clock starts. The reader looks at its sockets every few milliseconds and parses
nothing before a round is over, so that it takes little of the cores that it shares with the server.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import time
from typing import Any

from rich.console import Console

from benchmarks import closed_loop, report
from benchmarks.server import started

LOOK_SECONDS = 0.004
END = {True: b"data: [DONE]\n\n\r\n0\r\n\r\n", False: b"}\n"}
console = Console(stderr=True)


def message(tokens: int, seed: int, stream: bool) -> bytes:
    """Return an HTTP request for this many tokens."""
    asked: dict[str, Any] = {
        "prompt": "Before we proceed any further, hear me speak. " * (1 + seed % 4),
        "max_tokens": tokens, "ignore_eos": True, "seed": seed, "stream": stream,
    }  # fmt: skip
    if stream:
        asked["stream_options"] = {"include_usage": True}
    return closed_loop.request("/v1/completions", json.dumps(asked).encode())


def burst(port: int, requests: int, tokens: int, stream: bool) -> dict[str, Any]:
    """Send all requests at once; return tokens a second, and how many pieces the answers came in."""
    replies = {socket.create_connection(("127.0.0.1", port)): bytearray() for _ in range(requests)}
    began = time.perf_counter()
    for seed, connection in enumerate(replies):
        connection.sendall(message(tokens, seed, stream))
    pieces = read_all(replies, END[stream])
    seconds = time.perf_counter() - began
    for connection in replies:
        connection.close()
    made = sum(tokens_of(bytes(reply), stream) for reply in replies.values())
    if made != requests * tokens:
        raise SystemExit(f"{requests} requests for {tokens} tokens gave {made}: see the server")
    return {"rate": made / seconds, "pieces": pieces}


def read_all(replies: dict[socket.socket, bytearray], end: bytes) -> int:
    """Read until every reply is whole; return the number of reads that had bytes."""
    pieces = 0
    with selectors.DefaultSelector() as selector:
        for connection in replies:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                assert isinstance(key.fileobj, socket.socket)
                connection = key.fileobj
                data, reply = connection.recv(1 << 20), replies[connection]
                reply += data
                pieces += 1
                if not data or reply.endswith(end):
                    selector.unregister(connection)
            time.sleep(LOOK_SECONDS)
    return pieces


def tokens_of(reply: bytes, stream: bool) -> int:
    """Return how many tokens an answer says it has; 0 of one that failed or was cut."""
    head, _, body = reply.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] or not reply.endswith(END[stream]):
        return 0
    if stream:
        lines = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
        body = max(lines, key=lambda line: b'"choices":[]' in line)  # that with the usage
    return int(json.loads(body)["usage"]["completion_tokens"])


def rounds(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of paired rounds, and the median of their ratios."""
    for stream in (False, True):
        burst(port, args.requests, min(args.tokens, 32), stream)
    pairs: list[dict[bool, dict[str, Any]]] = []
    for i in range(args.rounds):
        order = (False, True) if i % 2 else (True, False)
        pairs.append({s: burst(port, args.requests, args.tokens, s) for s in order})
    return {
        "whole": statistics.median(pair[False]["rate"] for pair in pairs),
        "streamed": statistics.median(pair[True]["rate"] for pair in pairs),
        "ratio": statistics.median(pair[True]["rate"] / pair[False]["rate"] for pair in pairs),
        "ratios": [round(pair[True]["rate"] / pair[False]["rate"], 3) for pair in pairs],
        "reads_per_stream": statistics.median(pair[True]["pieces"] for pair in pairs) / args.requests,
    }


def arguments() -> argparse.Namespace:
    parser = report.parser("streaming", __doc__)
    parser.add_argument("--model", default="bard")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--policy", default="dynamic")
    parser.add_argument("--requests", type=int, default=64, help="sent at once, and slots")
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--rounds", type=int, default=7, help="pairs, of which the median counts")
    parser.add_argument("--port", type=int, help="of a server that runs already")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.port:
        figures = rounds(args.port, args)
    else:
        flags = ("--model", args.model, "--load-format", args.load_format, "--dtype", args.dtype)
        with started(args.policy, *flags, "--max-batch-size", str(args.requests)) as (port, _):
            figures = rounds(port, args)
    console.print(
        f"{args.requests} at once, {args.tokens} tokens each: {figures['whole']:.0f} tokens/s, streamed "
        f"{figures['streamed']:.0f}; streaming costs {100 * (1 - figures['ratio']):.1f} %"
    )
    result = {
        "model": args.model, "load_format": args.load_format,
        "dtype": args.dtype, "policy": args.policy, "requests": args.requests,
        "tokens": args.tokens, **figures,
    }  # fmt: skip
    report.finish("streaming", result, args.json)


if __name__ == "__main__":
    main()
