"""The load that a button of the live page starts: requests put straight into the queue of this server.

A browser opens at most six connections to a host, so requests from the page itself would never fill a batch.
"""

from __future__ import annotations

import random
import threading
import time
from typing import NamedTuple

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


class Arrival(NamedTuple):
    """A request of the load, and when to send it, in seconds from the start."""

    at: float
    prompt: str
    num_tokens: int
    seed: int


class Load:
    """One load at a time. Its progress can be read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = self._seed = self._rejected = 0
        self._inferences: list[Inference] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, engine: Engine, params: LoadRequest) -> bool:
        """Start to send; return False if another load is active."""
        with self._lock:
            if self.progress()["active"]:
                return False
            self._total, self._seed, self._rejected = params.count, params.seed, 0
            self._inferences = []
            self._stopping.clear()
            self._thread = threading.Thread(
                target=self._run, args=(engine, arrivals(params)), name="demo-load", daemon=True
            )
            self._thread.start()
            return True

    def stop(self) -> None:
        """Send no more requests; those that were sent are answered."""
        self._stopping.set()

    def progress(self) -> dict[str, int | bool]:
        """Return the body of GET /load."""
        inferences, rejected = list(self._inferences), self._rejected
        ended = [inference for inference in inferences if inference.is_finished]
        failed = sum(inference.error is not None for inference in ended)
        is_sending = self._thread is not None and self._thread.is_alive()
        return {
            "total": self._total, "sent": len(inferences) + rejected, "done": len(ended) - failed,
            "failed": failed + rejected, "active": is_sending or len(ended) < len(inferences), "seed": self._seed,
        }  # fmt: skip

    def span(self) -> tuple[float, float] | None:
        """Return when the first and the last request arrived, on the loop's clock; None before there are any."""
        arrived = [inference.sequence.arrived_at for inference in list(self._inferences)]
        return (arrived[0], arrived[-1]) if arrived else None

    def _run(self, engine: Engine, plan: list[Arrival]) -> None:
        began = time.monotonic()
        for arrival in plan:
            # A tiny rate gives gaps that no lock can wait for.
            delay = min(max(0.0, arrival.at - (time.monotonic() - began)), threading.TIMEOUT_MAX)
            if self._stopping.wait(delay):
                return
            try:
                self._inferences.append(_enqueue(engine, arrival))
            except (ApiError, InferenceError):  # too long for the context, or the server is full
                self._rejected += 1


def _enqueue(engine: Engine, arrival: Arrival) -> Inference:
    prompt = Prompt(arrival.prompt, encode(engine, arrival.prompt, special=False))
    length = resolve_max_tokens(engine, prompt, arrival.num_tokens, "num_tokens", "prompt")
    inference = engine.make_inference(prompt.text, length, prompt.ids, seed=arrival.seed, temperature=1.0)
    return engine.manager.enqueue(inference)


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
