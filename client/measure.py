"""The numbers of a load run: from the outcomes of single requests to the result object.

Everything here is pure: outcomes and facts go in, plain dictionaries come out. It must not know
how requests are sent or where text is printed, and it reads no clock.

Definitions: latency (E2E) counts from the *intended* send time to the last byte, lag is actual
minus intended send time, percentiles are interpolated linearly. The keys are those of
`vllm bench serve`, so that others' plotting works, with our own beside them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LAG_BOUND_MS = 10.0
_STREAMED_ONLY = ("ttft", "tpot", "itl")
_STATISTICS = ("mean", "median", "std", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request; times are seconds after the start of the run."""

    index: int
    asked_tokens: int
    intended: float
    sent: float
    ended: float
    tokens: int = 0
    error: str = ""
    detail: str = ""
    completion: str = ""

    @property
    def latency(self) -> float:
        """Give the seconds from the intended send time to the last byte."""
        return self.ended - self.intended


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is known of a run besides its outcomes."""

    date: str
    config: Mapping[str, Any]
    seed: int
    trace_sha256: str
    request_rate: float
    burstiness: float | None
    num_prompts: int
    server_before: Mapping[str, Any] | None
    server_after: Mapping[str, Any] | None
    machine: Mapping[str, Any]
    versions: Mapping[str, str]


def statistics_ms(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Give mean, median, std, p50, p90 and p99 in milliseconds; None where nothing was measured."""
    if not seconds:
        return {f"{statistic}_{name}_ms": None for statistic in _STATISTICS}
    values = np.asarray(seconds) * 1000
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    numbers = (values.mean(), p50, values.std(), p50, p90, p99)
    return {f"{key}_{name}_ms": float(n) for key, n in zip(_STATISTICS, numbers)}


def client_lag(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Give how late requests left (ms): p50, p99 and max."""
    if not outcomes:
        return {"p50_ms": None, "p99_ms": None, "max_ms": None}
    lags = [(outcome.sent - outcome.intended) * 1000 for outcome in outcomes]
    p50, p99 = np.percentile(lags, [50, 99])
    return {"p50_ms": float(p50), "p99_ms": float(p99), "max_ms": max(lags)}


def max_concurrent(outcomes: Sequence[Outcome]) -> int:
    """Count how many requests were under way at once, at most."""
    changes = [(o.sent, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes]
    running = highest = 0
    for _, change in sorted(changes):
        running += change
        highest = max(highest, running)
    return highest


def throughput(outcomes: Sequence[Outcome]) -> dict[str, float | int | None]:
    """Give duration and rates over the wall clock, first arrival to last completion."""
    done = [outcome for outcome in outcomes if not outcome.error]
    tokens = sum(outcome.tokens for outcome in done)
    duration = max(o.ended for o in done) - min(o.intended for o in outcomes) if done else None
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": None,
        "total_output_tokens": tokens,
        "request_throughput": len(done) / duration if duration else None,
        "request_goodput": None,
        "output_throughput": tokens / duration if duration else None,
        "total_token_throughput": None,
        "max_output_tokens_per_s": None,
        "max_concurrent_requests": max_concurrent(outcomes),
    }


def result(outcomes: Sequence[Outcome], facts: RunFacts) -> dict[str, Any]:
    """Build the result object; what cannot be known without streaming or a tokenizer is null."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome.index)
    done = [outcome for outcome in outcomes if not outcome.error]
    server = facts.server_after or facts.server_before or {}
    engine = server.get("engine")
    per_token = [outcome.latency / outcome.tokens for outcome in done if outcome.tokens]
    numbers = throughput(outcomes)
    for name in _STREAMED_ONLY:
        numbers |= statistics_ms(name, [])
    return {
        "date": facts.date,
        "backend": "effective-batching",
        "model_id": engine.get("model") if isinstance(engine, Mapping) else None,
        "num_prompts": facts.num_prompts,
        "request_rate": facts.request_rate if facts.request_rate != float("inf") else "inf",
        "burstiness": facts.burstiness,
        "max_concurrency": None,
        **numbers,
        **statistics_ms("e2el", [outcome.latency for outcome in done]),
        "mean_latency_per_token_ms": 1000 * sum(per_token) / len(per_token) if per_token else None,
        "input_lens": None,
        "output_lens": [outcome.tokens for outcome in outcomes],
        "ttfts": None,
        "itls": None,
        "e2els": [None if outcome.error else outcome.latency for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
        "failures": dict(Counter(o.error for o in outcomes if o.error).most_common()),
        "unsent": facts.num_prompts - len(outcomes),
        "seed": facts.seed,
        "trace_sha256": facts.trace_sha256,
        "policy": server.get("policy"),
        "config": dict(facts.config),
        "machine": dict(facts.machine),
        "versions": dict(facts.versions),
        "client_lag": client_lag(outcomes),
        "server_before": facts.server_before,
        "server_after": facts.server_after,
    }


def rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lay out a result as the lines of the final table, in the field's words and order."""
    e2e = "".join(
        f" / {_shown(numbers[f'{key}_e2el_ms'])}" for key in ("mean", "p50", "p90", "p99")
    )
    lag = "".join(
        f" / {_shown(numbers['client_lag'][f'{key}_ms'])}" for key in ("p50", "p99", "max")
    )
    return [
        ("Successful requests", str(numbers["completed"])),
        ("Failed requests", str(numbers["failed"])),
        ("Duration (s)", _shown(numbers["duration"])),
        ("Requests/s", _shown(numbers["request_throughput"])),
        ("Output tokens", str(numbers["total_output_tokens"])),
        ("Output tokens/s (wall clock)", _shown(numbers["output_throughput"])),
        ("Most requests at once", str(numbers["max_concurrent_requests"])),
        ("Latency per token, mean (ms)", _shown(numbers["mean_latency_per_token_ms"])),
        ("E2E mean / p50 / p90 / p99 (ms)", e2e[3:]),
        ("Client lag p50 / p99 / max (ms)", lag[3:]),
    ]


def warnings(numbers: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    """Say what spoils the figures: failures by kind, a client that sent late, a cut run."""
    found = []
    for kind, count in numbers["failures"].items():
        detail = next((o.detail for o in outcomes if o.error == kind and o.detail), "")
        found.append(f"{count} failed: {kind}" + (f": {detail}" if detail else ""))
    p99 = numbers["client_lag"]["p99_ms"]
    if p99 is not None and p99 > LAG_BOUND_MS:
        found.append(
            f"this client sent late: lag p99 {p99:.1f} ms, above {LAG_BOUND_MS:g} ms. Latencies "
            "count from the intended time, so they hold the lag. Use fewer requests at once or "
            "an idler machine for the client"
        )
    if numbers["unsent"]:
        found.append(f"stopped early: {numbers['unsent']} of {numbers['num_prompts']} never sent")
    return found


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}"
