"""A result as text: its tables, and the warnings above them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from terminal.console import table_of

from .measure import Outcome

LAG_BOUND_MS = 10.0
STALL_BOUND_MS = 50.0
LEFT: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
PLAIN: dict[str, Any] = {**LEFT, "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}  # no more lines than it needs


def result(numbers: Mapping[str, Any]) -> list[Table]:
    """Return a result as tables: latencies, and counts and rates."""
    counts = table_of("Result", ("", " "), rows(numbers), show_header=False, **LEFT)
    times = table_of("Milliseconds", ("", *STATISTICS), latencies(numbers), **LEFT)
    turns = [by_turn(numbers["turns"])] if numbers.get("turns") else []
    return [times, *turns, counts]


def originals(stats: Mapping[str, Any]) -> list[Table]:
    """Return the original's four lines of `/stats` as a table; [] if the server has none of them."""
    lines = [(name, shown(stats.get(name), digits), what) for name, digits, what in STATS]
    if all(text == "-" for _, text, _ in lines):
        return []
    heads = ("", "value", "the original's formula")
    return [
        table_of("The original's figures in /stats, since the server's start", heads, lines, words=heads[2:], **LEFT)
    ]


def by_turn(turns: Sequence[Mapping[str, Any]]) -> Table:
    """Return the turns of conversations as a table."""
    columns = {
        "turn": "turn", "answered": "completed", "TTFT ms, mean": "mean_ttft_ms", "p99": "p99_ttft_ms",
        "E2E ms, mean": "mean_e2el_ms", "prompt tokens": "prompt_tokens", "cached": "cached_tokens",
    }  # fmt: skip
    lines = [[shown(turn[key], 1 if key.endswith("_ms") else 0) for key in columns.values()] for turn in turns]
    return table_of("Turns of the conversations", columns, lines, left=0, **PLAIN)


def blame(name: str, figures: Mapping[str, Any]) -> Table:
    """Return the matrix of how much each client's requests delayed each other's, as a table."""
    caption = "waits: until it joins; runs: from there to the answer; client columns: time saved without that client's requests, one by one"
    lines = []
    waits, runs = figures["wait_ms"], figures["run_ms"]
    for k, client in enumerate(figures["clients"]):
        times = [(part["alone"][k], *part["by"][k], part["residual"][k]) for part in (waits, runs)]
        values = [waits["simulated"][k], runs["simulated"][k], *map(sum, zip(*times))]
        lines.append([client, *(shown(value, 0) for value in values)])
    title = f"{name}, simulated: ms per request, and which clients caused them"
    heads = ("client", "waits", "runs", "alone", *figures["clients"], "residual")
    return table_of(title, heads, lines, caption=caption, **PLAIN)


def programs(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return title, heads and lines of the table of the programs of these runs, served or simulated; no table without any."""
    columns = {
        "done": "completed", "failed": "failed", "mean s": "mean_s", "p99 s": "p99_s", "slow": "mean_slowdown",
        "p99": "p99_slowdown", "Jain": "jain_slowdown", "bound": "above_least_mean",
    }  # fmt: skip
    found = [(run, of) for run in runs if (of := run.get("programs") or (run.get("simulation") or {}).get("programs"))]
    kept = {head: key for head, key in columns.items() if any(of.get(key) is not None for _, of in found)}
    loads = len({(run.get("load"), run.get("repeat")) for run, _ in found}) > 1
    lines = [
        [str(run["policy"] or run["model_id"]),
         *([run["load"] + (f" #{run['repeat'] + 1}" if run["repeat"] else "")] if loads else []),
         *(shown(of.get(key), 2 * isinstance(of.get(key), float)) for key in kept.values())]
        for run, of in found
    ]  # fmt: skip
    title = "programs in a closed loop" + "; slow: slowdown" * ("slow" in kept)
    title += "; bound: 1 is twice the lower bound" * ("bound" in kept)
    return [(title, ["policy", *(["load"] if loads else []), *kept], lines)] if lines else []


def rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and values of counts and rates, in the usual words and order; unknown values are left out."""
    refused = sum(count for kind, count in numbers["failures"].items() if is_refusal(kind))
    lines = [
        ("Successful requests", str(numbers["completed"])),
        ("Refused requests", str(refused) if refused else "-"),
        ("Failed requests", str(numbers["failed"] - refused)),
        ("Duration (s)", shown(numbers["duration"])),
        ("Requests/s", shown(numbers["request_throughput"])),
        ("Input tokens", shown(numbers["total_input_tokens"], 0)),
        ("Output tokens", shown(numbers["total_output_tokens"], 0)),
        ("Answers ended by the model", ended(numbers.get("finish_reasons") or {})),
        ("Output tokens/s (wall clock)", shown(numbers["output_throughput"])),
        ("Total tokens/s", shown(numbers["total_token_throughput"])),
        ("Peak concurrent requests", shown(numbers["max_concurrent_requests"], 0)),
        ("Requests/s within all limits", shown(numbers["request_goodput"])),
        ("Latency per token, mean (ms)", shown(numbers["mean_latency_per_token_ms"])),
        ("Latency over requested tokens", fitted(numbers["fairness"])),
        ("Jain's index of tokens/s", shown(numbers["fairness"]["jain_requests"], 3)),
    ]
    return [(label, text) for label, text in lines if label in ALWAYS or text != "-"]


def is_refusal(kind: str) -> bool:
    """Whether a failure of this kind is a server that was full, or a policy that turned a request away."""
    return kind == "refused" or kind.startswith("HTTP 429") or "(overloaded)" in kind


def latencies(numbers: Mapping[str, Any]) -> list[list[str]]:
    """Return each measured time with its `STATISTICS` in ms."""
    lag = numbers["client_lag"]
    lines = [
        (label, [numbers.get(f"{key}_{name}_ms") for key in STATISTICS])
        for label, name in (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2el"), ("Queue", "queue"))
    ]
    lines += [
        (label, [lag.get(f"{prefix}{key}_ms") for key in STATISTICS])
        for label, prefix in (("Client lag", ""), ("Client stalls", "stall_"))
        if lag.get(f"{prefix}max_ms")
    ]
    return [[label, *map(shown, values)] for label, values in lines if any(v is not None for v in values)]


STATISTICS = ("mean", "p50", "p90", "p99", "max")
# The original's four figures, their digits and formulas.
STATS = (
    ("latency-per-token", 4, "s, mean of latency / tokens"),
    ("throughput", 2, "tokens / sum of latencies, not per second"),
    ("total-tokens-handled", 0, "tokens"),
    ("total-elapsed-time", 2, "s, sum of latencies"),
)
ALWAYS = {"Duration (s)", "Requests/s"}


def shown(value: float | None, digits: int = 2) -> str:
    """Format a figure; None becomes "-"."""
    if value is None:
        return "-"
    return f"{value:,.{0 if abs(value) >= 1000 else digits}f}"


def ended(reasons: Mapping[str, int]) -> str:
    """Format how many answers the model ended; the others reached a limit."""
    total = sum(reasons.values())
    return f"{total - reasons.get('length', 0)} of {total}" if total else "-"


def fitted(fairness: Mapping[str, float | None]) -> str:
    """Format the fit of latency over requested tokens."""
    slope, intercept, r = (fairness[k] for k in ("slope_ms_per_token", "intercept_ms", "r"))
    if slope is None or intercept is None or r is None:
        return "-"
    return f"{intercept:,.0f} ms {'-' if slope < 0 else '+'} {abs(slope):,.2f} ms/token, r = {r:.3f}"


def warnings_of(numbers: Mapping[str, Any], outcomes: Sequence[Outcome]) -> list[str]:
    """Return the reasons to doubt the figures: failures by kind, a client that sent late, an interrupted run."""
    warnings = []
    for kind, count in numbers["failures"].items():
        detail = next((o.detail for o in outcomes if o.error == kind and o.detail), "")
        verb = "refused" if is_refusal(kind) else "failed"
        warnings.append(f"{count} {verb}: {kind}" + (f": {detail}" if detail else ""))
    warnings += filter(None, [lateness([numbers])])
    if numbers["unsent"]:
        waits = numbers.get("turns") or numbers.get("programs")
        why = "a request that they waited for failed, or the run was stopped" if waits else "the run was stopped"
        warnings.append(f"{numbers['unsent']} of {numbers['num_prompts']} requests were not sent: {why}")
    return warnings


def lateness(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning if the client itself added too much to the times of some of these runs; "" if it was in time."""
    worst = [[run["client_lag"].get(key) or 0.0 for key in ("p99_ms", "stall_max_ms")] for run in runs]
    late = [(sent, stalled) for sent, stalled in worst if sent > LAG_BOUND_MS or stalled > STALL_BOUND_MS]
    if not late:
        return ""
    sent, stalled = map(max, zip(*late))
    which = f" in {len(late)} of {len(runs)} runs, at worst" if len(runs) > 1 else ""
    return (
        f"this client sent late or stalled{which} with a lag p99 of {sent:.1f} ms and a stall of {stalled:.0f} ms. "
        "Latencies include both. Use fewer concurrent requests or a less busy machine for the client"
    )
