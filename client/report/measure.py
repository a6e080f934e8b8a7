"""The numbers of a load run: from the outcomes of single requests to the result object.

Everything here is pure: outcomes and facts go in, plain dictionaries come out. It must not know
how requests are sent or where text is printed, and it reads no clock.

Definitions: latency (E2E) counts from the *intended* send time to the last byte, lag is actual
minus intended send time, percentiles are interpolated linearly. The keys are those of
`vllm bench serve`, so that existing plotting scripts work, and more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import figures

_STATISTICS = ("mean", "median", "std", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request; times are seconds after the start of the run.

    Only streams have `first`, `gaps` (between chunks) and `chunks` (tokens of each, 0 if unknown), and only chat messages
    `turn` (1 for the first of a conversation) and `finish_reason`. `asked_tokens` of a chat is the length of its answer;
    `max_tokens` is the limit that was sent, None if the request named none.
    """

    index: int
    asked_tokens: int
    intended: float
    sent: float
    ended: float
    tokens: int = 0
    error: str = ""
    detail: str = ""
    completion: str = ""
    first: float | None = None
    gaps: tuple[float, ...] = ()
    chunks: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    queue: float | None = None
    batch_mean: float | None = None
    batch_max: int | None = None
    id: str = ""
    user: str = ""
    finish_reason: str = ""
    turn: int | None = None
    max_tokens: int | None = None
    program: str = ""

    @property
    def latency(self) -> float:
        """Return the seconds from the intended send time to the last byte."""
        return self.ended - self.intended

    @property
    def ttft(self) -> float | None:
        """Return the seconds from the intended send time to the first token; None without a stream."""
        return None if self.first is None else self.first - self.intended

    @property
    def tpot(self) -> float | None:
        """Return the seconds for each token after the first; None for a single one."""
        if self.ttft is None or self.tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.tokens - 1)

    @property
    def sizes(self) -> list[int]:
        """Return the tokens of each chunk; chunks of unknown size share the remaining tokens evenly."""
        unknown, count = self.chunks.count(0), 0
        rest = max(0, self.tokens - sum(self.chunks)) if self.tokens else unknown
        sizes = []
        for size in self.chunks:
            if not size:
                # In whole tokens, so that they add up; the first of two unequal shares is the greater one.
                size = -(-rest * (count + 1) // unknown) + (-rest * count // unknown)
                count += 1
            sizes.append(size)
        return sizes

    @property
    def itls(self) -> list[float]:
        """Return the seconds between tokens; a gap before n tokens that came together counts as n gaps of an n-th each."""
        arrivals = [(0.0, 0)]  # the seconds before tokens that came together, and their number
        for gap, size in zip((0.0, *self.gaps), self.sizes):
            before, tokens = arrivals[-1]
            if gap and tokens:
                arrivals.append((gap, size))
            else:  # at the same moment, or after a chunk without tokens, whose gap is part of the next
                arrivals[-1] = before + gap, tokens + size
        return [gap / size for gap, size in arrivals[1:] for _ in range(size)]

    @property
    def normalized(self) -> float | None:
        """Return latency / tokens, the original's latency per token."""
        return self.latency / self.tokens if self.tokens else None


def statistics_ms(name: str, seconds: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Return mean, median, std, p50, p90 and p99 in milliseconds; None if nothing was measured."""
    if len(seconds) == 0:
        return {f"{key}_{name}_ms": None for key in _STATISTICS}
    values = np.asarray(seconds) * 1000
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    numbers = (values.mean(), p50, values.std(), p50, p90, p99)
    return {f"{key}_{name}_ms": float(number) for key, number in zip(_STATISTICS, numbers)}


def client_lag(outcomes: Sequence[Outcome], stalls: Sequence[float] = ()) -> dict[str, float | None]:
    """Return how late requests were sent and how long the client stalled (ms): p50, p99 and max."""
    result: dict[str, float | None] = {}
    for prefix, seconds in (("", [outcome.sent - outcome.intended for outcome in outcomes]), ("stall_", stalls)):
        values = np.asarray(seconds) * 1000
        p50, p99 = np.percentile(values, [50, 99]).tolist() if len(values) else (None, None)
        highest = float(values.max()) if len(values) else None
        result |= {f"{prefix}p50_ms": p50, f"{prefix}p99_ms": p99, f"{prefix}max_ms": highest}
    return result


def max_concurrent(outcomes: Sequence[Outcome]) -> int:
    """Return the highest number of concurrent requests."""
    changes = [(o.sent, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes]
    running = highest = 0
    for _, change in sorted(changes):
        running += change
        highest = max(highest, running)
    return highest


def throughput(outcomes: Sequence[Outcome]) -> dict[str, float | int | None]:
    """Return duration and rates over the wall clock, first arrival to last completion."""
    done = [outcome for outcome in outcomes if not outcome.error]
    tokens = sum(outcome.tokens for outcome in done)
    duration = max(o.ended for o in done) - min(o.intended for o in outcomes) if done else None
    prompts = [o.prompt_tokens for o in done]
    inputs = sum(p for p in prompts if p is not None) if done and None not in prompts else None
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": tokens,
        "request_throughput": len(done) / duration if duration else None,
        "request_goodput": None,
        "output_throughput": tokens / duration if duration else None,
        "total_token_throughput": (tokens + inputs) / duration if duration and inputs is not None else None,
        "max_output_tokens_per_s": peak(done),
        "max_concurrent_requests": max_concurrent(outcomes),
    }


def peak(done: Sequence[Outcome]) -> float | None:
    """Return the tokens of the best whole second; None unless all answers were streamed."""
    if not done or any(o.first is None for o in done):
        return None
    seconds: dict[int, float] = defaultdict(float)
    for o in done:
        at = o.first or 0.0
        for gap, tokens in zip((0.0, *o.gaps), o.sizes):
            at += gap
            seconds[int(at)] += tokens
    return float(max(seconds.values(), default=0.0))


def fairness(done: Sequence[Outcome]) -> dict[str, float | None]:
    """Return measures of fairness: latency over requested tokens, and Jain's index."""
    line = figures.fit([o.asked_tokens for o in done], [o.latency * 1000 for o in done])
    slope, intercept, r = line or (None, None, None)
    return {
        "slope_ms_per_token": slope,
        "intercept_ms": intercept,
        "r": r,
        "jain_requests": figures.jain([o.tokens / o.latency for o in done if o.latency > 0]),
    }


def meets(outcome: Outcome, slos: Mapping[str, float]) -> bool:
    """Return whether a request was answered within all limits; the TPOT of a single token is 0."""
    if outcome.error:
        return False
    measures = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    measured = {name: measures[name] for name in slos}
    return all(value is not None and value * 1000 <= slos[name] for name, value in measured.items())


def result(
    outcomes: Sequence[Outcome], *, slos: Mapping[str, float] | None = None, stalls: Sequence[float] = (),
    has_intervals: bool = True, **facts: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the result object: the facts of the run, and its figures; those that need streaming or a tokenizer may be null.

    `slos` are limits in ms by measure. Of the facts, `num_prompts`, `request_rate`, `server_before` and `server_after` are read.
    """
    outcomes = sorted(outcomes, key=lambda outcome: outcome.index)
    done = [outcome for outcome in outcomes if not outcome.error]
    server = facts["server_after"] or facts["server_before"] or {}
    engine = server.get("engine")
    numbers = throughput(outcomes)
    if slos and numbers["duration"]:
        numbers["request_goodput"] = sum(meets(o, slos) for o in outcomes) / numbers["duration"]
    per_token = [o.normalized for o in done if o.normalized is not None]
    prompts = [o.prompt_tokens for o in outcomes]
    streamed = any(o.first is not None for o in done)
    return {
        **facts,
        "model_id": engine.get("model") if isinstance(engine, Mapping) else facts.get("model_id"),
        "request_rate": facts["request_rate"] if facts["request_rate"] != float("inf") else "inf",
        **numbers,
        **distributions(done),
        "mean_latency_per_token_ms": 1000 * sum(per_token) / len(per_token) if per_token else None,
        "input_lens": prompts if any(length is not None for length in prompts) else None,
        "cached_lens": [outcome.cached_tokens for outcome in outcomes],
        "output_lens": [outcome.tokens for outcome in outcomes],
        "start_times": [outcome.intended for outcome in outcomes],
        "ttfts": [None if o.error else o.ttft for o in outcomes] if streamed else None,
        "itls": [o.itls for o in outcomes] if streamed else None,
        "e2els": [None if outcome.error else outcome.latency for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
        "asked_lens": [outcome.asked_tokens for outcome in outcomes],
        "failures": dict(Counter(o.error for o in outcomes if o.error).most_common()),
        "unsent": facts["num_prompts"] - len(outcomes),
        "finish_reasons": dict(Counter(o.finish_reason for o in done if o.finish_reason).most_common()),
        "fairness": fairness(done),
        "slos_ms": dict(slos or {}),
        "intervals": intervals(done) if has_intervals else {},
        "policy": server.get("policy"),
        "client_lag": client_lag(outcomes, stalls),
    }


def series(done: Sequence[Outcome]) -> dict[str, list[float | None]]:
    """Return the values of every measure of single requests, in order."""
    return {
        "ttft": [o.ttft for o in done],
        "tpot": [o.tpot for o in done],
        "e2el": [o.latency for o in done],
        "normalized_latency": [o.normalized for o in done],
    }


def distributions(done: Sequence[Outcome]) -> dict[str, float | None]:
    """Return the statistics of every measure of single requests; ITL is pooled over all tokens."""
    each = series(done)
    each |= {"itl": [gap for o in done for gap in o.itls], "queue": [o.queue for o in done]}
    numbers: dict[str, float | None] = {}
    for name, values in each.items():
        numbers |= statistics_ms(name, [value for value in values if value is not None])
    return numbers


def intervals(done: Sequence[Outcome]) -> dict[str, Any]:
    """Return 95 % intervals within this run (block bootstrap over requests) of mean, p50 and p99."""
    found: dict[str, Any] = {}
    for name, values in series(sorted(done, key=lambda o: o.intended)).items():
        found |= figures.intervals(name, values)
    return found
