"""The load that the live page starts: requests put straight into the queue of this server.

A browser opens at most six connections to a host, so requests from the page itself would never fill a batch. A load is
either bounded, with its times set in advance, or endless: users who each wait for an answer before they ask again, so
that no policy is ever overrun.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from api.generation import Prompt, encode, resolve_max_tokens
from api.http.errors import ApiError
from api.schemas.demo import LoadRequest
from api.service import Engine
from batching import Inference, InferenceError

PROMPTS = (
    "ROMEO:", "JULIET:\nO ", "First Citizen:\nBefore we proceed any further, hear me speak.\n", "KING RICHARD:\n",
    "To be, or not to be", "Shall I compare thee", "All the world's a stage,\nAnd all the men and women",
    "MENENIUS:\nThere was a time when all the body's members\nRebell'd against the belly", "Good morrow, cousin.",
    "Now is the winter of our discontent\nMade glorious summer by this sun of York", "What, ho!", "DUKE OF YORK:\n",
)  # fmt: skip
LONG = 400  # tokens of a long prompt, or half the context
SHARED = 304  # tokens that shared prompts have in common, or a third of the context
ONE_IN = 4  # of so many prompts, one is long, or does not share its beginning
CHECK_SECONDS = 0.5  # between two checks that an endless load is still wanted
REFUSED_SECONDS = 1.0  # until a user whose request was refused tries again
_numbers = itertools.count(1)  # of requests with a named client, which differ in all loads of this process
_loads = itertools.count(1)  # endless loads of this process


class Arrival(NamedTuple):
    """A request of the load, and when to send it, in seconds from the start."""

    at: float
    prompt: str
    num_tokens: int
    seed: int


class Sending(Protocol):
    """One load: its requests, and the thread that sends them."""

    def stop(self) -> None: ...
    def progress(self) -> dict[str, int | bool]: ...
    def span(self) -> tuple[float, float] | None: ...


class Load:
    """One load at a time. Its progress can be read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sending: Sending | None = None
        self._params: LoadRequest | None = None

    def start(self, engine: Engine, params: LoadRequest, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Start to send; return False if another load is active and not to be replaced.

        An endless load ends when it is no longer `wanted`.
        """
        with self._lock:
            if self._sending is not None and self.progress()["active"]:
                if not params.replace:
                    return False
                self._sending.stop()
            self._params = params
            self._sending = Users(engine, params, wanted) if params.users else Plan(engine, params)
            return True

    def stop(self) -> None:
        """Send no more requests; those that were sent are answered."""
        if self._sending is not None:
            self._sending.stop()

    def span(self) -> tuple[float, float] | None:
        """Return when the first and the last request arrived, on the loop's clock; None before there are any."""
        return None if self._sending is None else self._sending.span()

    def progress(self) -> dict[str, Any]:
        """Return the body of GET /load."""
        counts = {"total": 0, "sent": 0, "done": 0, "failed": 0, "active": False}
        if self._sending is not None:
            counts |= self._sending.progress()
        params = None if self._params is None else self._params.model_dump(exclude={"replace"})
        return {**counts, "seed": 0 if params is None else params["seed"], "params": params}


class Plan:
    """A bounded load, each request at its time."""

    def __init__(self, engine: Engine, params: LoadRequest) -> None:
        self._engine, self._total, self._rejected = engine, params.count, 0
        self._inferences: list[Inference] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(arrivals(params),), name="demo-load", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def progress(self) -> dict[str, int | bool]:
        inferences, rejected = list(self._inferences), self._rejected
        ended = [inference for inference in inferences if inference.is_finished]
        failed = sum(inference.error is not None for inference in ended)
        return {
            "total": self._total, "sent": len(inferences) + rejected, "done": len(ended) - failed,
            "failed": failed + rejected, "active": self._thread.is_alive() or len(ended) < len(inferences),
        }  # fmt: skip

    def span(self) -> tuple[float, float] | None:
        arrived = [inference.sequence.arrived_at for inference in list(self._inferences)]
        return (arrived[0], arrived[-1]) if arrived else None

    def _run(self, plan: list[Arrival]) -> None:
        began = time.monotonic()
        for arrival in plan:
            # A tiny rate gives gaps that no lock can wait for.
            delay = min(max(0.0, arrival.at - (time.monotonic() - began)), threading.TIMEOUT_MAX)
            if self._stopping.wait(delay):
                return
            try:
                prompt = Prompt(arrival.prompt, encode(self._engine, arrival.prompt, special=False))
                inference = _inference(self._engine, prompt, arrival.num_tokens, arrival.seed)
                self._inferences.append(self._engine.manager.enqueue(inference))
            except (ApiError, InferenceError):  # too long for the context, or the server is full
                self._rejected += 1


class Question(NamedTuple):
    """A request of a user, and how long the user pauses before it, in seconds."""

    pause: float
    prompt: Prompt
    num_tokens: int
    seed: int


class Users:
    """An endless load: each user pauses, sends a request, waits for the answer, and so on."""

    def __init__(self, engine: Engine, params: LoadRequest, wanted: Callable[[], bool]) -> None:
        self._engine, self._params, self._wanted = engine, params, wanted
        self._open: dict[int, Inference] = {}  # by user
        self._ended: SimpleQueue[int] = SimpleQueue()  # users whose requests have ended
        self._sent = self._done = self._failed = 0
        self._span: tuple[float, float] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-load", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def progress(self) -> dict[str, int | bool]:
        self._count_rest()
        is_open = any(not inference.is_finished for inference in list(self._open.values()))
        return {
            "total": self._sent, "sent": self._sent, "done": self._done, "failed": self._failed,
            "active": self._thread.is_alive() or is_open,
        }  # fmt: skip

    def span(self) -> tuple[float, float] | None:
        return self._span

    def _run(self) -> None:
        load = next(_loads)
        questions = [asked_by(user, self._engine, self._params, load) for user in range(self._params.users)]
        upcoming = [next(each) for each in questions]
        due = [(time.monotonic() + question.pause, user) for user, question in enumerate(upcoming)]
        heapq.heapify(due)
        while self._wanted() and not self._stopping.is_set():
            now = time.monotonic()
            while due and due[0][0] <= now:
                user = heapq.heappop(due)[1]
                if not self._send(user, upcoming[user]):
                    heapq.heappush(due, (now + REFUSED_SECONDS, user))
            wait = min(CHECK_SECONDS, due[0][0] - now) if due else CHECK_SECONDS
            try:
                user = self._ended.get(timeout=max(0.001, wait))
            except Empty:
                continue
            self._count(user)
            upcoming[user] = next(questions[user])
            heapq.heappush(due, (time.monotonic() + upcoming[user].pause, user))

    def _send(self, user: int, question: Question) -> bool:
        """Send a request; return False if it was refused."""
        names: dict[str, Any] = {}
        if self._params.quiet_users:
            client = "quiet" if user < self._params.quiet_users else "loud"
            names = {"client": client, "id": f"{client}-{next(_numbers)}"}
        self._sent += 1
        try:
            inference = _inference(
                self._engine, question.prompt, question.num_tokens, question.seed,
                on_end=lambda: self._ended.put(user), **names,
            )  # fmt: skip
            self._open[user] = inference
            self._engine.manager.enqueue(inference)
        except (ApiError, InferenceError):
            self._open.pop(user, None)
            self._failed += 1
            return False
        arrived = inference.sequence.arrived_at
        self._span = (arrived if self._span is None else self._span[0], arrived)
        return True

    def _count(self, user: int) -> None:
        inference = self._open.pop(user, None)
        if inference is not None:
            self._failed += inference.error is not None
            self._done += inference.error is None

    def _count_rest(self) -> None:
        """Count what has ended since the thread has."""
        while not self._thread.is_alive():
            try:
                self._count(self._ended.get_nowait())
            except Empty:
                return


def _inference(engine: Engine, prompt: Prompt, num_tokens: int, seed: int, **options: Any) -> Inference:
    length = resolve_max_tokens(engine, prompt, num_tokens, "num_tokens", "prompt")
    return engine.make_inference(prompt.text, length, prompt.ids, seed=seed, temperature=1.0, **options)


def arrivals(params: LoadRequest) -> list[Arrival]:
    """Return the requests of a load, the same for the same seed: with exponential gaps, or all at once for rate 0."""
    random_state = random.Random(params.seed)
    low, high = sorted((params.min_tokens, params.max_tokens))
    at = 0.0
    plan = []
    for _ in range(params.count):
        at += random_state.expovariate(params.rate) if params.rate else 0.0
        prompt, num_tokens = random_state.choice(PROMPTS), random_state.randint(low, high)
        plan.append(Arrival(at, prompt, num_tokens, random_state.getrandbits(31)))
    return plan


def asked_by(user: int, engine: Engine, params: LoadRequest, load: int = 0) -> Iterator[Question]:
    """Yield the requests of a user of an endless load, the same for the same seed and user.

    Only the number of the `load` differs, with which a prompt begins: nothing but what prompts share by intent is to be
    found in the prefix cache.
    """
    random_state = random.Random(f"{params.seed} {user}")
    low, high = sorted((params.min_tokens, params.max_tokens))
    shared = _tokens_of(engine, f"{load}. Instructions.\n", min(SHARED, engine.context // 3))
    for number in itertools.count():
        pause = random_state.expovariate(1 / params.pause) if params.pause else 0.0
        own = f"{load}.{user}.{number}. {random_state.choice(PROMPTS)}"
        is_rare = random_state.randrange(ONE_IN) == 0
        ids = _tokens_of(engine, own)
        if params.prompts == "long" and is_rare:
            ids = _tokens_of(engine, own, min(LONG, engine.context // 2))
        elif params.prompts == "shared":
            ids = _tokens_of(engine, own, len(shared)) if is_rare else shared + ids
        ids = [*engine.tokenizer.bos_ids, *ids]
        prompt = Prompt(engine.tokenizer.decode(ids), ids)
        yield Question(pause, prompt, random_state.randint(low, high), random_state.getrandbits(31))


def _tokens_of(engine: Engine, text: str, count: int = 0) -> list[int]:
    """Return the tokens of a text or, with a count, so many: the text and then the prompts, as often as needed."""
    ids = engine.tokenizer.encode(text)
    if not count:
        return ids
    more = engine.tokenizer.encode("\n".join(PROMPTS))
    return list(itertools.islice(itertools.chain(ids, itertools.cycle(more)), count))
