"""A real server whose pulse is taken: what must be true of it after every case, and the client's own ledger.

It must not know the cases.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tests.support import wait_until
from tests.support.faults import arming
from tests.support.servers import Answer, Server, read_answer

REFUSED = {"/inference": 400, "/v1/completions": 400, "/generate": 422}
TGI = frozenset({"/", "/generate", "/generate_stream"})
GENERATING = TGI | {"/inference", "/v1/completions", "/v1/chat/completions"}
NOT_COUNTED = (401, 403)  # refused before anybody asks what they want
CANARY = {"prompt": "the house", "num_tokens": 12, "temperature": 0}
SLOTS, QUEUE = 8, 24
RESERVE = 32  # threads beyond one for each place
PATIENCE = 60.0  # seconds for what should take two, on a machine that does other things too
MB = 1 << 20
MOCK = "mock:llm-mock@50"
LONG = json.dumps({"prompt": "the house", "num_tokens": 900}).encode()  # to /inference


@dataclass(frozen=True)
class Setting:
    """How a server is started, beside its policy.

    With `mock` it has a model that needs no torch, for what happens before and around the model; its tokens are bytes,
    as those of the computed model. The requests of `first` are sent before any pulse is taken: the first error of a kind
    loads the code that reports it, and that is no leak.
    """

    argv: tuple[str, ...] = ()
    faults: Mapping[str, Any] = field(default_factory=dict)
    queue: int = QUEUE
    environment: Mapping[str, str] = field(default_factory=dict)
    first: tuple[bytes, ...] = ()
    mock: bool = False
    front_ends: int = 0


@dataclass(frozen=True)
class Pulse:
    """What the process that computes holds at one moment: its front ends begin threads when they need them."""

    pid: int
    threads: int
    descriptors: int
    rss: int

    @staticmethod
    def of(pid: int) -> Pulse:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return Pulse(pid, int(status["Threads"]), descriptors, int(status["VmRSS"].split()[0]) << 10)


class Ledger:
    """What the client knows of its requests to generate: how many were answered how, and how many it left."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()
        self.left = 0
        self._lock = threading.Lock()

    def leave(self, n: int = 1) -> None:
        """Note that the client hung up on `n` requests that the server had read."""
        with self._lock:
            self.left += n

    def note(self, method: str, path: str, status: int) -> None:
        """Note an answer, if it was to a request to generate that came past the door."""
        path = path.partition("?")[0]
        if method != "POST" or path not in GENERATING or status in NOT_COUNTED:
            return
        with self._lock:
            self.answers["cancelled" if status == 499 else f"{status // 100}xx"] += 1


def check_error(path: str, answer: Answer) -> None:
    """Hold an error to the form of its dialect: small JSON that tells nothing of the machine."""
    assert len(answer.body) < 8192
    text = answer.body.decode()
    for secret in ("Traceback", ".py", "/usr/", "/home/", "/tmp/", "site-packages"):
        assert secret not in text, text
    content = json.loads(text)
    if path.partition("?")[0] in TGI:
        assert isinstance(content["error"], str), text
        assert content["error_type"], text
    elif "error" in content:  # what has none is the state of a server that is not ready
        assert {"message", "type", "param", "code"} == set(content["error"]), text
        assert content["error"]["message"], text


class Watched(Server):
    """A server that is held to the after-check."""

    answers_of: ClassVar[dict[str, str]] = {}  # to the canary, by model: every server of a model gives the same one

    def __init__(self, log: Path, policy: str, model: Path, setting: Setting) -> None:
        self.model = MOCK if setting.mock else str(model)
        tiny = ["--dtype", "float32", "--compute-threads", "1", "--kv-memory", "16M"]
        filler = ["--tokenizer-file", str(model.with_suffix(".tiktoken"))]
        argv = [
            policy, "--model", self.model, *(filler if setting.mock else tiny),
            "--max-batch-size", str(SLOTS), "--max-queue", str(setting.queue),
            "--front-ends", str(setting.front_ends), *setting.argv,
        ]  # fmt: skip
        faults = arming(setting.faults) if setting.faults else {}
        super().__init__(log, *argv, **faults, **setting.environment)
        self.policy = policy
        self.first = setting.first
        self.front_ends = setting.front_ends
        self._fronts: set[int] = set()
        self.places = (1 if policy == "nobatch" else SLOTS) + setting.queue
        self.threads = SLOTS + setting.queue + RESERVE
        self.ledger = Ledger()

    def __enter__(self) -> Watched:
        super().__enter__()
        self.warm_up()
        return self

    @property
    def worker(self) -> int:
        """The pid of the process that computes; 0 while there is none, or one beside its successor."""
        workers = self.workers
        if len(workers) != 1 + self.front_ends:
            return 0
        if not self._fronts & {*workers}:  # all are new, and gunicorn has begun the one that computes before the others
            self._fronts = {*workers[1:]}
        return next((pid for pid in workers if pid not in self._fronts), 0)

    def pulse(self) -> Pulse:
        return Pulse.of(self.worker)

    def warm_up(self) -> None:
        """Let every thread begin and every page be touched, as in the first busy hour; hear the canary."""
        wait_until(lambda: self.worker, PATIENCE)
        self.cold = self.pulse()
        wait_until(self.has_all_threads, 60)
        full = [{"prompt": chr(97 + i) * 900, "num_tokens": 100} for i in range(SLOTS)]
        sent = [self.begin("/inference", json.dumps(each).encode()) for each in full]
        for sock in sent:
            assert read_answer(sock).status == 200
            sock.close()
        for each in self.first:
            self.ask("/inference", each)
        assert self.canary() == self.golden
        wait_until(self.is_at_rest, PATIENCE)

    def has_all_threads(self) -> bool:
        """Send as many halves of requests as there are threads; return whether each has begun by now.

        A server with little patience answers the first halves while a slow machine still begins threads for the last.
        It needs none for those it has, so the next try gets further.
        """
        threads = self.threads
        with contextlib.ExitStack() as stack:
            halves = [stack.enter_context(self.connect()) for _ in range(threads)]
            for half in halves:
                half.sendall(b"GET /health HTTP/1.1\r\n")
            wait_until(lambda: self.pulse().threads >= threads or select.select(halves[:1], [], [], 0)[0], 60)
            for half in halves:
                with contextlib.suppress(ConnectionError):  # the server has closed it
                    half.sendall(b"Host: localhost\r\nConnection: close\r\n\r\n")
                    half.recv(1)
        return self.pulse().threads >= threads

    @property
    def golden(self) -> str:
        """What the first server of this model answered to the canary."""
        if self.model not in self.answers_of:
            self.answers_of[self.model] = self.canary()
        return self.answers_of[self.model]

    def canary(self) -> str:
        """Return what the model says to the one question whose answer never changes."""
        answer = self.ask("/inference", json.dumps(CANARY).encode())
        assert answer.status == 200, answer.body
        return str(answer.json["completion"])

    def ask(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> Answer:
        """Return the answer to one request on its own connection, noted and held to the form of errors.

        The content type is JSON unless it is given; "" sends none.
        """
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        kind = headers.setdefault("Content-Type", "application/json")
        if not kind:
            del headers["Content-Type"]
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            answer = Answer(reply.status, reply.headers, reply.read())
        self.note(path, answer, method)
        return answer

    def note(self, path: str, answer: Answer, method: str = "POST") -> None:
        """Write an answer into the ledger, and look at it if it is an error."""
        self.ledger.note(method, path, answer.status)
        if answer.status >= 400:
            check_error(path, answer)

    def connect(self, receive_buffer: int = 0) -> socket.socket:
        """Return a connection for bytes as they are; what it asks for is the caller's to note."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def begin(self, path: str, body: bytes, id: str = "", receive_buffer: int = 0) -> socket.socket:
        """Send a request to generate and return its connection without reading from it."""
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n" + (f"X-Request-Id: {id}\r\n" if id else "")
        sock = self.connect(receive_buffer)
        sock.sendall(f"{head}\r\n".encode() + body)
        return sock

    def collect(self, socks: Iterable[socket.socket], path: str = "/inference") -> list[Answer]:
        """Return the answers on these connections, noted."""
        answers = []
        for sock in socks:
            answers.append(read_answer(sock))
            sock.close()
            self.note(path, answers[-1])
        return answers

    def figures(self) -> dict[str, Any]:
        result: dict[str, Any] = self.get("/stats").json
        return result

    def taken_in(self) -> int:
        """How many requests wait, run or have been answered: one that was only received may still be refused."""
        now = self.figures()
        return int(now["requests"] + now["requests-running"] + now["requests-waiting"])

    @property
    def slots(self) -> int:
        """How many run at once under this policy."""
        return 1 if self.policy == "nobatch" else SLOTS

    def is_full(self) -> bool:
        """Whether who comes now must wait: without joining at any step, as soon as somebody runs."""
        return bool(self.figures()["requests-running"] >= (SLOTS if self.policy == "dynamic" else 1))

    def knows(self, id: str) -> bool:
        """Whether a request has come as far as the queue."""
        return "arrived_at" in self.told(id)

    def told(self, id: str) -> dict[str, Any]:
        """Return what the server tells of a request."""
        result: dict[str, Any] = self.get(f"/requests/{id}").json
        return result

    def is_at_rest(self) -> bool:
        """Whether nobody waits or runs, all slots and pages are free, and everybody who came was answered."""
        now = self.figures()
        answered = sum(n for name, n in now["http"].items() if name != "received")
        busy = (now["requests-running"], now["requests-waiting"], now["engine"]["kv"]["pages_used"])
        slots = self.get("/slots").json
        return (
            busy == (0, 0, 0)
            and now["http"]["received"] == answered
            and not any(slot["is_processing"] for slot in slots)
        )

    @contextlib.contextmanager
    def watched(self, *, killed: bool = False, tracebacks: bool = False, growth: int = 20 * MB) -> Iterator[None]:
        """Hold the server to the after-check; one that may be `killed` has a new process and new books."""
        if self.worker != self.cold.pid:  # a case before this one had it killed
            self.warm_up()
        self.ledger = Ledger()
        before, pulse, said = self.figures()["http"], self.pulse(), len(self.output())
        yield
        wait_until(self.is_ready, 60 if killed else PATIENCE)
        assert self.canary() == self.golden
        wait_until(self.is_at_rest, PATIENCE)
        if not killed:
            self._check_pulse(pulse, growth)
            self._check_books(before)
        if not tracebacks:
            assert "Traceback" not in self.output()[said:], self.output()[said:]

    def is_ready(self) -> bool:
        try:
            return self.get("/ready").status == 200
        except (OSError, http.client.HTTPException):
            return False

    def has_new_worker(self, old: int) -> bool:
        """Whether another process than `old` serves, and is ready."""
        return self.worker not in (0, old) and self.is_ready()

    def _check_pulse(self, before: Pulse, growth: int) -> None:
        def is_as_before() -> bool:
            now = self.pulse()
            return abs(now.threads - before.threads) <= 3 and abs(now.descriptors - before.descriptors) <= 3

        wait_until(is_as_before, PATIENCE)
        now = self.pulse()
        assert now.pid == before.pid
        assert now.rss - before.rss < growth, (before, now)

    def _check_books(self, before: Mapping[str, int]) -> None:
        ours = self.ledger
        server: dict[str, int] = {}

        def has_counted_all() -> bool:
            now = self.figures()["http"]
            server.update({name: now[name] - before[name] for name in now})
            return server["received"] >= ours.answers.total() + ours.left

        wait_until(has_counted_all, PATIENCE)  # a front end tells what it has counted a moment later
        assert server["received"] == ours.answers.total() + ours.left, (server, ours.answers, ours.left)
        beyond = {name: server[name] - ours.answers[name] for name in server if name != "received"}
        assert min(beyond.values()) >= 0, (server, ours.answers)  # each answer that came is in its books
        assert sum(beyond.values()) == ours.left
