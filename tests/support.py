"""What several tests of the server need: an engine without a model, and a real process."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flask import Flask

import policies
from api.service import Engine
from batching import BatchingManager, Inference
from generate.text import AnswerText
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Token

ROOT = Path(__file__).resolve().parent.parent
EOT = "<|endoftext|>"
SAMPLING = {
    "temperature", "top_k", "top_p", "seed", "ignore_eos", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "prompt_logprobs",
}  # fmt: skip


def run_async(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a thread of its own: in this one, the loop of the browser's tests may be running."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, coroutine).result()


class FakeTokenizer:
    """A byte is a token; token 256 ends a text. Counts what it is asked."""

    vocab_size = 257
    longest_token = 4
    bos_ids: tuple[int, ...] = ()
    eos_ids = (256,)
    special_ids = frozenset([256])
    chat_template: Any = None

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str, end_of_text: Any = "text") -> list[int]:
        self.encoded += 1
        if end_of_text == "special":
            parts = text.split(EOT)
            return [t for i, part in enumerate(parts) for t in ([256] * (i > 0) + list(part.encode()))]
        return list(text.encode())

    def encode_chat(self, messages: Any, add_generation_prompt: bool = True) -> tuple[str, list[int]]:
        text, ids = self.chat_template(messages, add_generation_prompt)
        return text, ids

    def token_bytes(self, token: int) -> bytes:
        return EOT.encode() if token == 256 else bytes([token])

    def decode_bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, tokens))

    def decode(self, tokens: Iterable[int], *, begins: bool = False) -> str:
        return self.decode_bytes(tokens).decode("utf-8", "replace")


class FakeDetail(NamedTuple):
    """What a model tells of a token: its log probability and rank, and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int = 1


class FakeModel:
    """Answers a, b, c, ..., or what `says` has; `before` is called with each plan and may wait or raise."""

    def __init__(self, says: bytes | list[int] = b"") -> None:
        self.plans = 0
        self.says = list(says)
        self.before: Callable[[Plan], None] = lambda plan: None

    def forward(self, plan: Plan) -> list[Any]:
        self.plans += 1
        self.before(plan)
        return [self.output(s, n) if n == s.pending else None for s, n in zip(plan.sequences, plan.counts)]

    def output(self, seq: Any, count: int) -> Any:
        at = len(seq.output_ids)
        token = self.says[at % len(self.says)] if self.says else 97 + at % 26
        wanted, of_prompt = (seq.sampling.get(n) for n in ("logprobs", "prompt_logprobs"))
        if wanted is None and of_prompt is None:
            return token
        own = None if wanted is None else detail(token, wanted)
        scored = [] if of_prompt is None or at else seq.prompt_ids[1:]
        return Token(token, own, [detail(t, of_prompt) for t in scored])


def detail(token: int, wanted: int) -> FakeDetail:
    """Return what the fake model tells: the token itself is the likeliest, with the log of 1/2."""
    others = [((token + i) % 256, -1.0 - i) for i in range(1, wanted)]
    return FakeDetail(token, -0.5, ((token, -0.5), *others)[:wanted])


def fake_engine(
    model: FakeModel | None = None,
    *,
    policy: str = "dynamic",
    context: int = 1024,
    max_batch_size: int = 8,
    max_queue: int = 8,
    tokenizer: Any = None,
    pages: PagePool | None = None,
) -> Engine:
    """Return an engine whose loop runs on a fake model; stop it with `engine.manager.stop()`."""
    tokenizer = tokenizer or FakeTokenizer()

    def make_inference(prompt: str, num_tokens: int, prompt_ids: list[int], **options: Any) -> Inference:
        sampling = {k: options.pop(k) for k in SAMPLING & options.keys()}
        written = {k: options.pop(k) for k in ("stops", "stop_ids", "keep_stop", "min_tokens") if k in options}
        text = AnswerText(
            tokenizer,
            **written,
            eos_ids=() if sampling.get("ignore_eos", True) else tokenizer.eos_ids,
            hidden=tokenizer.special_ids if options.pop("hide_special", False) else (),
        )
        return Inference(prompt, num_tokens, prompt_ids, sampling=sampling, text=text, **options)

    manager = BatchingManager(
        model or FakeModel(),
        pages=pages,
        max_batch_size=max_batch_size,
        max_queue=max_queue,
        make_inference=make_inference,
    )
    manager.start(policies.get_policy(policy, max_batch_size=max_batch_size))
    wait_until(lambda: manager.is_alive)
    return Engine(
        manager=manager, make_inference=make_inference, model=manager.model, tokenizer=tokenizer, model_name="fake",
        device="cpu", dtype="float32", kv_dtype="float32", context=context,
        vocabulary=tokenizer.vocab_size, n_pages=0, page_size=16, tokens_per_step=2048,
    )  # fmt: skip


def unchunked(data: bytes) -> bytes:
    """Return what HTTP chunks hold."""
    whole = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        assert data[n : n + 2] == b"\r\n"
        whole, data = whole + data[:n], data[n + 2 :]
    return whole


def places_taken(app: Flask) -> int:
    """Return how many places of the queue the requests of an app hold."""
    taken: int = app.extensions["service"].engine.manager.inbox.places.taken
    return taken


def wait_until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Return as soon as `condition()` is true; fail when it is not in time.

    It asks ever less often: a question to a server takes both sides longer than the first pauses.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, "it did not happen in time"
        time.sleep(min(max(0.002, waited / 10), 0.05))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on.

    It is below those that the system gives to outgoing connections: one of them may take such a port before a server
    that has just been started does.
    """
    while True:
        port = 15_000 + secrets.randbelow(15_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without anybody's settings, and never asking a hub."""
    own = ("EB_", "TRITON_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(own) and k != "BATCHING"}
    cache = {k: os.environ[k] for k in ("EB_CACHE_DIR",) if k in os.environ}
    return {**kept, **cache, "HF_HUB_OFFLINE": "1", **extra}


def run_app(*argv: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run app.py to its end, as server.sh does."""
    return subprocess.run(
        [sys.executable, str(ROOT / "app.py"), *argv],
        capture_output=True, text=True, timeout=60, cwd=cwd, env=clean_environment(**extra),
    )  # fmt: skip


@dataclass
class Answer:
    """A response, whatever its status."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """A server in a process of its own; `with` waits until it is ready and stops it by its pid."""

    def __init__(self, log: Path, *argv: str, key: str = "", **extra: str) -> None:
        self.port = free_port()
        self.key = key
        self.log = log
        self.argv = [*argv, "--host", "127.0.0.1", "--port", str(self.port)]
        self.extra = extra

    def start(self) -> Server:
        """Start the process without waiting for it."""
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "app.py"), *self.argv],
                stdout=stderr, stderr=stderr, env=clean_environment(**self.extra),
            )  # fmt: skip
        return self

    def wait(self, seconds: float = 90.0) -> Server:
        """Wait until /health says ok."""
        end = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            with contextlib.suppress(OSError):
                if self.get("/health").status == 200:
                    return self
            time.sleep(0.05)

    def __enter__(self) -> Server:
        self.start()
        try:
            return self.wait()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, seconds: float = 60.0) -> int:
        """End it politely and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def output(self) -> str:
        """Return what it said so far."""
        return self.log.read_text("utf-8", "replace")

    def get(self, path: str) -> Answer:
        return self.send("GET", path)

    def post(self, path: str = "/inference", **fields: Any) -> Answer:
        return self.send("POST", path, json.dumps(fields).encode())

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Return the answer to one request on a connection of its own."""
        if self.key:
            headers.setdefault("Authorization", f"Bearer {self.key}")
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, {"Connection": "close", **headers})
            reply = connection.getresponse()
            return Answer(reply.status, reply.headers, reply.read())

    def switch(self, policy: str) -> Server:
        """Let another policy decide from the next iteration on."""
        body = json.dumps({"policy": policy}).encode()
        assert self.send("PUT", "/policy", body, **{"Content-Type": "application/json"}).status == 200
        return self

    def burst(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        """Send all bodies at once, each on a connection that is already open; return their answers."""
        connections = [socket.create_connection(("127.0.0.1", self.port), 60) for _ in bodies]
        try:
            for connection, fields in zip(connections, bodies):
                body = json.dumps(fields).encode()
                head = f"POST /inference HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
                connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
            return [read_answer(connection) for connection in connections]
        finally:
            for connection in connections:
                connection.close()


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and those that it has started, without a warning; do nothing if it has ended."""
    if process.poll() is None:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def processes_of(pid: int) -> list[int]:
    """Return the pid and those of its children, and of theirs."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [pid, *(other for child in map(int, listed) for other in processes_of(child))]


def read_answer(connection: socket.socket) -> Answer:
    """Read until the other side closes; return the one answer that came."""
    data = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Answer(int(status.split()[1]), headers, body)


@contextlib.contextmanager
def in_background(act: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run `act` in a thread meanwhile; the list gets its result, at the latest at the end."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    yield results
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
