"""A designed load that shows what a server's steps cost: phases of few requests, each of which tells something else.

All that may be sent is planned before anything is. This module must not know what is fitted to the log.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from client.data import TOKENS_PER_WORD, Planned
from client.report.measure import Outcome
from client.send.load import LoadRun
from client.send.target import Target
from client.workloads.corpus import plays

STEP_SECONDS = 0.03  # of a server that was not measured yet
PROMPT_TOKENS_PER_STEP = 100.0  # that take as long as a step without them, where nothing is known
REST = 0.25  # of the time of requests, after them: a law that is a little too slow must not let the next ones wait for them
SHORT, ANSWER, LONG = 32, 128, 1024  # tokens
WIDEST = 64  # burst, but for one that exceeds the slots that a server reports
TRAFFIC = 96  # requests of different lengths
MOST_OF_TIME = 0.5  # that is left, for a phase with others behind it
CUT = "cut off"  # of a request when the time is up


@dataclass(frozen=True)
class Phase:
    """Requests that together tell something: (after how many steps, prompt tokens, answer tokens) of each.

    With `users`, that many are open, and the next is sent when one ends.
    """

    name: str
    tells: str
    asks: Sequence[tuple[float, int, int]]
    users: int | None = None

    @property
    def tokens(self) -> int:
        """The most tokens that it takes, of prompts and answers."""
        return sum(prompt + answer for _, prompt, answer in self.asks)

    def seconds(self, step: float = STEP_SECONDS, prompt_tokens: float = PROMPT_TOKENS_PER_STEP) -> float:
        """Return about how long it takes on a server with enough slots."""
        ends, prompts = [after + answer for after, _, answer in self.asks], sum(prompt for _, prompt, _ in self.asks)
        return step * ((sum(ends) / self.users if self.users else max(ends)) + prompts / prompt_tokens)

    def within(self, tokens: int, seconds: float = math.inf, *pace: float) -> Phase | None:
        """Return as many of its requests as may be sent, None if none may."""
        parts = (replace(self, asks=self.asks[:count]) for count in range(len(self.asks), 0, -1))
        return next(
            (part for part in parts if part.tokens <= tokens and part.seconds(*pace) <= seconds / (1 + REST)), None
        )


def plan(tokens: int, context: int, server: Mapping[str, Any], rng: np.random.Generator) -> list[Phase]:
    """Return the phases that fit a bound of tokens, the more important ones first; `server` is what is known of it."""
    long, answer, slots = min(LONG, context // 2), min(ANSWER, context // 4), server.get("slots")
    widths = [width for width in (2, 4, 8, 16, 32, WIDEST) if not slots or width < slots]
    widths += [*[slots] * (1 < slots <= WIDEST), slots + 8] if slots else []
    bursts = [Phase(f"burst {width}", "decode, slots", [(0, SHORT, answer // 4)] * width) for width in widths]
    prompts = np.clip(rng.lognormal(math.log(64), 1, TRAFFIC), 8, long // 2).astype(int).tolist()
    answers = np.clip(rng.lognormal(math.log(32), 0.8, TRAFFIC), 4, answer).astype(int).tolist()
    memory = [(0, long // 2, answer)] * math.ceil(1.1 * server.get("kv_tokens", 0) / (long // 2 + answer))
    phases = [
        Phase("first", "tokens per word", [(0, 128, 8)]),
        Phase("alone", "step", [(0, SHORT, answer)] * 2, users=1),
        Phase("lengths", "prompt", [(0, long // n, 4) for n in (1, 2, 8)] * 2, users=1),
        *bursts[:-1],
        Phase("mixed", "prompt beside decodes", [*[(0, SHORT, answer)] * 4, *((answer * n // 8, long, 4) for n in (1, 3, 5))]),
        Phase("deep", "context of a batch", [(0, long // 2, answer // 2)] * 8),
        *([Phase("memory", "KV memory", memory)] if 0 < len(memory) * (long // 2 + answer) <= tokens / 3 else []),
        Phase("traffic", "queues", [*zip([0.0] * TRAFFIC, prompts, answers)], users=min(slots or 8, WIDEST) + 4),
        bursts[-1],
    ]  # fmt: skip
    fitting: list[Phase] = []
    for phase in phases:
        part = phase.within(tokens - sum(each.tokens for each in fitting))
        fitting += [part] if part else []
    return fitting


@dataclass
class Probe:
    """Sends the phases of a plan while tokens and time (`until`, by time.perf_counter) last.

    `rows` are what was measured, also if it fails, by the names of a log's requests.
    """

    target: Target
    phases: Sequence[Phase]
    tokens: int
    until: float
    rng: np.random.Generator
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    spent: int = 0
    phase: str = ""
    _step: float = STEP_SECONDS
    _prompt_tokens: float = PROMPT_TOKENS_PER_STEP
    _tokens_per_word: float = TOKENS_PER_WORD

    def run(self) -> None:
        """Send the phases; RuntimeError if a request fails."""
        for phase in self.phases:
            left = (self.until - time.perf_counter()) * (1 if phase.name == "traffic" else MOST_OF_TIME)
            part = phase.within(self.tokens - self.spent, left, self._step, self._prompt_tokens)
            alone = (
                [replace(part, asks=[ask]) for ask in part.asks] if part and part.users == 1 else [part] if part else []
            )
            outcomes = [outcome for i, each in enumerate(alone) for outcome in self._send(each, i)]
            if len(outcomes) < len(phase.asks) or any(o.error for o in outcomes):
                self.left_out.append(phase.name)
            elif phase.name in ("first", "alone"):
                self._step = median(sum(o.gaps) / max(1, o.tokens - 1) for o in outcomes) or STEP_SECONDS
            elif phase.name == "lengths":
                longest = max(outcomes, key=lambda o: o.prompt_tokens or 0)
                wait = (longest.first or 0.0) - longest.sent
                self._prompt_tokens = max(0.01, self._step * (longest.prompt_tokens or 1) / max(wait, 1e-6))
            if phase.name == "first" and outcomes:
                words = round(phase.asks[0][1] / TOKENS_PER_WORD)
                self._tokens_per_word = (outcomes[0].prompt_tokens or words) / words

    def _send(self, phase: Phase, number: int = 0) -> list[Outcome]:
        """Send a phase, or its request of this number, and rest; return the outcomes in order, with times since its start."""
        self.phase = phase.name
        asks = enumerate(phase.asks)
        trace = [Planned(i, after * self._step, self._prompt(prompt), most) for i, (after, prompt, most) in asks]
        run = LoadRun(self.target, trace, phase.users)
        run.start()
        start = time.perf_counter() - run.now()
        try:
            run.wait(max(0.0, self.until - time.perf_counter()))
        finally:  # Ctrl-C keeps what was measured
            outcomes = sorted(run.outcomes(), key=lambda outcome: outcome.index)
            run.close()
            self.spent += sum((o.prompt_tokens or 0) + o.tokens for o in outcomes)
            if phase.name != "first":  # which may wait for a compilation
                self.rows += [row(phase, o, start, number) for o in outcomes]
        for o in outcomes:
            error = o.error or ("" if o.first and o.prompt_tokens else "the answer is no stream with usage")
            if error not in ("", CUT):
                remedy = "Check the server, --api, --model and --api-key, raise --timeout, or lower --tokens"
                raise RuntimeError(f"a request of phase {phase.name!r} failed: {error}: {o.detail[:80]}. {remedy}")
        time.sleep(max(0.0, min(REST * run.now(), self.until - time.perf_counter())))
        return outcomes

    def _prompt(self, tokens: int) -> str:
        """Return a prompt that shares no page with another: it begins with words of three places of the plays."""
        words = max(1, round(tokens / self._tokens_per_word))
        return " ".join(" ".join(plays().piece(self.rng, count) for count in (2, 2, words)).split()[:words])


def row(phase: Phase, o: Outcome, start: float, number: int = 0) -> dict[str, Any]:
    """Return an outcome by the names of a log's requests, of which it has this number in the phase, or one after it."""
    _, prompt, limit = phase.asks[o.index]
    chunks = [] if o.first is None else np.cumsum([start + o.first, *o.gaps]).round(6).tolist()
    return {
        "id": f"{phase.name}/{number + o.index}", "sent": round(start + o.sent, 6), "prompt": o.prompt_tokens or prompt,
        "output": o.tokens or sum(o.sizes) or limit, "limit": limit, "chunks": chunks, "counts": o.sizes, "cached": o.cached_tokens,
        "first": chunks[0] if chunks else None, "last": chunks[-1] if chunks else None, "error": o.error,
    }  # fmt: skip
