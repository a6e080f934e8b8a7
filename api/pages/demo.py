"""The load that the live page starts: requests put straight into the queue of this server.

A browser opens at most six connections to a host, so requests from the page itself would never fill a batch. A load is
either bounded, with its times set in advance, or endless: users who each wait for an answer before they ask again, so
that no policy is ever overrun. To the thread that sends them, both are users: those of a bounded load ask once.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from api.http.errors import ApiError
from api.prompts import Prompt, resolve_max_tokens
from api.schemas.demo import LoadRequest
from api.service import LoadedEngine
from batching import Inference, InferenceError

PROMPTS = (
    "ROMEO:", "JULIET:\nO ", "First Citizen:\nBefore we proceed any further, hear me speak.\n", "KING RICHARD:\n",
    "To be, or not to be", "Shall I compare thee", "All the world's a stage,\nAnd all the men and women",
    "MENENIUS:\nThere was a time when all the body's members\nRebell'd against the belly", "Good morrow, cousin.",
    "Now is the winter of our discontent\nMade glorious summer by this sun of York", "What, ho!", "DUKE OF YORK:\n",
)  # fmt: skip
LONG = 400  # tokens of a long prompt, or half the context
SHARED = 304  # tokens that shared prompts have in common, or a third of the context
ONE_IN = 4  # one prompt in this many is long, or does not share its beginning
CHECK_SECONDS = 0.5  # at most, between two checks that an endless load is still wanted
REFUSED_SECONDS = 1.0  # until a user whose request was refused tries again


class Question(NamedTuple):
    """A request of a user, and how long the user pauses before it, in seconds."""

    pause: float
    prompt: Prompt
    num_tokens: int
    seed: int


class Load:
    """One load at a time. Its progress can be read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sender: Sender | None = None
        self._params: LoadRequest | None = None
        self._numbers = itertools.count(1)  # of endless loads, and of requests with a named client
        self._asked_at = 0.0
        self.left: Callable[[], None] = lambda: None  # called when an endless load ends because no one wants it

    def start(self, engine: LoadedEngine, params: LoadRequest, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Start to send; return False if another load is active and not to be replaced.

        An endless load ends when it is no longer `wanted`, or its lease is over.
        """
        self._asked_at = time.monotonic()

        def is_wanted() -> bool:
            return wanted() and not 0 < params.lease < time.monotonic() - self._asked_at

        with self._lock:
            if self._sender is not None and self._sender.is_active:
                if not params.replace:
                    return False
                self._sender.stop()
            self._params = params
            self._sender = Sender(engine, params, is_wanted, self._numbers, self.left)
            return True

    def stop(self) -> None:
        """Send no more requests; those that were sent are answered."""
        if self._sender is not None:
            self._sender.stop()

    def span(self) -> tuple[float, float] | None:
        """Return when the first and the last request arrived, on the loop's clock; None before there are any."""
        return None if self._sender is None else self._sender.span

    def progress(self) -> dict[str, Any]:
        """Return the body of GET /load, which renews the lease of a load."""
        self._asked_at = time.monotonic()
        counts = {"total": 0, "sent": 0, "done": 0, "failed": 0, "active": False}
        if self._sender is not None:
            counts |= self._sender.progress()
        params = None if self._params is None else self._params.model_dump(exclude={"replace"})
        return {**counts, "seed": 0 if params is None else params["seed"], "params": params}


class Sender:
    """The users of one load, and the thread that sends their requests and counts the answers."""

    def __init__(
        self, engine: LoadedEngine, params: LoadRequest, wanted: Callable[[], bool], numbers: Iterator[int],
        left: Callable[[], None],
    ) -> None:  # fmt: skip
        self._engine, self._params, self._wanted, self._numbers, self._left = engine, params, wanted, numbers, left
        self._sent = self._done = self._failed = 0
        self.span: tuple[float, float] | None = None  # arrivals of the first and the last request
        self._is_stopping = False
        self._ended: SimpleQueue[int | None] = SimpleQueue()  # users whose requests have ended; None wakes the thread
        self._thread = threading.Thread(target=self._run, name="demo-load", daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """Whether requests are still sent or open."""
        return self._thread.is_alive()

    def stop(self) -> None:
        self._is_stopping = True
        self._ended.put(None)

    def progress(self) -> dict[str, int | bool]:
        return {
            "total": self._sent if self._params.users else self._params.count,
            "sent": self._sent, "done": self._done, "failed": self._failed, "active": self.is_active,
        }  # fmt: skip

    def _run(self) -> None:
        engine, params, number = self._engine, self._params, next(self._numbers)
        users = [asked_by(user, engine, params, number) for user in range(params.users)]
        users = users or [iter([question]) for question in arrivals(engine, params)]
        due: list[tuple[float, int, Question]] = []
        pending: dict[int, Inference] = {}  # by user

        def schedule(user: int) -> None:
            for question in itertools.islice(users[user], 1):
                heapq.heappush(due, (time.monotonic() + question.pause, user, question))

        for user in range(len(users)):
            schedule(user)
        while due or pending:
            if self._is_stopping or (self._params.users and not self._wanted()):
                due.clear()
            now = time.monotonic()
            while due and due[0][0] <= now:
                _, user, question = heapq.heappop(due)
                inference = self._send(user, question)
                if inference is not None:
                    pending[user] = inference
                elif self._params.users:
                    heapq.heappush(due, (now + REFUSED_SECONDS, user, question))
            if not (due or pending):
                break
            wait = due[0][0] - time.monotonic() if due else CHECK_SECONDS
            try:
                ended = self._ended.get(timeout=min(CHECK_SECONDS, max(0.0, wait)))
            except Empty:
                continue
            if ended is not None:
                has_failed = pending.pop(ended).error is not None
                self._failed += has_failed
                self._done += not has_failed
                schedule(ended)
        if self._params.users and not self._is_stopping:
            self._left()

    def _send(self, user: int, question: Question) -> Inference | None:
        """Send a request; return None if it was refused: it is too long for the context, or the server is full."""
        names: dict[str, Any] = {}
        if self._params.quiet_users:
            client = "quiet" if user < self._params.quiet_users else "loud"
            names = {"client": client, "id": f"{client}-{next(self._numbers)}"}
        self._sent += 1
        prompt = question.prompt
        try:
            length = resolve_max_tokens(self._engine, prompt, question.num_tokens, "num_tokens", "prompt")
            inference = self._engine.make_inference(
                prompt.text, length, prompt.ids, seed=question.seed, temperature=1.0,
                on_end=lambda: self._ended.put(user), **names,
            )  # fmt: skip
            self._engine.manager.enqueue(inference)
        except (ApiError, InferenceError):
            self._failed += 1
            return None
        arrived = inference.sequence.arrived_at
        self.span = (arrived if self.span is None else self.span[0], arrived)
        return inference


def arrivals(engine: LoadedEngine, params: LoadRequest) -> Iterator[Question]:
    """Yield the requests of a bounded load, the same for the same seed: with exponential gaps, or all at once for rate 0."""
    random_state = random.Random(params.seed)
    low, high = sorted((params.min_tokens, params.max_tokens))
    at = 0.0
    for _ in range(params.count):
        at += random_state.expovariate(params.rate) if params.rate else 0.0
        text, num_tokens = random_state.choice(PROMPTS), random_state.randint(low, high)
        prompt = Prompt(text, [*engine.tokenizer.bos_ids, *_tokens_of(engine, text)])
        yield Question(at, prompt, num_tokens, random_state.getrandbits(31))


def asked_by(user: int, engine: LoadedEngine, params: LoadRequest, load: int = 0) -> Iterator[Question]:
    """Yield the requests of a user of an endless load, the same for the same seed and user.

    Each prompt begins with the number of the `load`, so that the prefix cache has no more of it than prompts share by
    intent.
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


def _tokens_of(engine: LoadedEngine, text: str, count: int = 0) -> list[int]:
    """Return the tokens of a text; with a count, that many: the text, and then the prompts over and over."""
    ids = engine.tokenizer.encode(text)
    if not count:
        return ids
    more = engine.tokenizer.encode("\n".join(PROMPTS))
    return list(itertools.islice(itertools.chain(ids, itertools.cycle(more)), count))
