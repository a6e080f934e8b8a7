"""One answer of many: the statistics, metrics and health of all replicas put together. Pure functions of their answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fleet.pool import Pool

SUMS = (
    "total-tokens-handled", "total-elapsed-time", "throughput-wall", "requests", "requests-failed", "requests-cancelled",
    "requests-timed-out", "requests-running", "requests-waiting", "tokens-waiting", "prompt-tokens-waiting",
)  # fmt: skip
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?( .*)")


def stats(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of /stats for the fleet, and those of each replica under `replicas`.

    Percentiles cannot be combined, so they are only there.
    """
    values = list(answers.values())
    result: dict[str, Any] = {name: sum(value.get(name) or 0 for value in values) for name in SUMS}
    seconds = sum((value["latency-per-token"] or 0) * value["requests"] for value in values)
    result["latency-per-token"] = seconds / result["requests"] if result["requests"] else None
    elapsed = result["total-elapsed-time"]
    result["throughput"] = result["total-tokens-handled"] / elapsed if elapsed else None
    policies = sorted({str(value["policy"]) for value in values})
    return result | {"policy": ", ".join(policies), "replicas": dict(answers)}


def metrics(texts: Mapping[str, str]) -> str:
    """Return Prometheus texts as one, in which each sample has the label `replica`; a metric's samples stay together."""
    families: dict[str, list[str]] = {}  # its # HELP and # TYPE, then the samples
    for replica, text in texts.items():
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                lines = families.setdefault(name, [])
            if line.startswith("#"):
                lines += [line] if is_new else []
            elif sample := SAMPLE.fullmatch(line):
                name, labels, value = sample.groups()
                others = f",{labels[1:]}" if labels and labels != "{}" else "}"
                lines.append(f'{name}{{replica="{replica}"{others}{value}')
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def health(answers: Mapping[str, tuple[int, Any]]) -> tuple[int, dict[str, Any]]:
    """Return the status and body of a health check: 200 while one replica passes it; `degraded` if another does not."""
    passed = [name for name, (status, _) in answers.items() if status == 200]
    status = "unavailable" if not passed else "ok" if len(passed) == len(answers) else "degraded"
    body: dict[str, Any] = {"status": status}
    if not answers:
        body["reason"] = "no replica is ready"
    elif len(passed) < len(answers):
        body["reason"] = "these replicas fail: " + ", ".join(name for name in answers if name not in passed)
    return (200 if passed else 503), body | {"replicas": {name: value for name, (_, value) in answers.items()}}


def own(pool: Pool) -> str:
    """Return the metrics of the ingress itself."""
    lines = [
        "# HELP eb_fleet_replicas Replicas that requests can go to.", "# TYPE eb_fleet_replicas gauge",
        f"eb_fleet_replicas {len(pool.known)}",
        "# HELP eb_fleet_retries_total Attempts that a replica refused or broke before the first token.",
        "# TYPE eb_fleet_retries_total counter", f"eb_fleet_retries_total {pool.retries}",
        "# HELP eb_fleet_open_requests Requests that the ingress has open at a replica.",
        "# TYPE eb_fleet_open_requests gauge",
        *(f'eb_fleet_open_requests{{replica="{name}"}} {known.open}' for name, known in pool.known.items()),
    ]  # fmt: skip
    return "".join(f"{line}\n" for line in lines)
