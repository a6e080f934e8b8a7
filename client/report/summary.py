"""A comparison as tables and as one sentence. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from terminal.console import table_of

from . import figures
from .store import Results
from .tables import PLAIN, programs, shown

TERMS = (
    "E2E: from the intended send time to the last token. TTFT: to the first token. ITL: between two tokens. "
    "Batch fill: the share of the slots that had a row. Wasted rows: the share of the rows computed without a new token. "
    "s per requested token, and r: the line that fits latency over requested tokens best. "
    "Figures of repeated runs are means of the runs' own; curves show the requests of all runs together."
)
Value = float | None


def average(runs: Sequence[Mapping[str, Any]], *path: str) -> Value:
    """Return the mean of a figure over repeats; None if one of them lacks it."""
    values = []
    for run in runs:
        value: Any = run
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        values.append(value)
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def spread(runs: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float] | None:
    """Return a figure's interval: over runs if there are at least 3 repeats, otherwise within a single run."""
    values: list[Any] = [run.get(key) for run in runs]
    if len(values) >= figures.MIN_RUNS and None not in values:
        return figures.student(values)
    within = (runs[0].get("intervals") or {}).get(key) if len(runs) == 1 else None
    return (within[0], within[1]) if within else None


@dataclass(frozen=True, slots=True)
class Column:
    """A figure of the tables: where a run has it, its unit and digits, and whether a high or a low one is better."""

    head: str
    path: tuple[str, ...]
    scale: float
    digits: int
    better: str = ""

    def is_known(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
        """Return whether any policy has the figure; one of `IF_ANY` only if it is above 0 somewhere."""
        values = [average(runs, *self.path) for runs in groups]
        return any(value is not None and (value or self.head not in IF_ANY) for value in values)

    def cell(self, runs: Sequence[Mapping[str, Any]]) -> str:
        """Return the mean of the figure over repeats, as text."""
        value = average(runs, *self.path)
        return shown(None if value is None else value * self.scale, self.digits)


COLUMNS = [
    Column("output tokens/s", ("output_throughput",), 1, 1, "high"),
    Column("requests/s", ("request_throughput",), 1, 2, "high"),
    Column("ms per token, mean", ("mean_normalized_latency_ms",), 1, 1, "low"),
    Column("E2E mean, s", ("mean_e2el_ms",), 0.001, 2, "low"),
    Column("E2E p50, s", ("p50_e2el_ms",), 0.001, 2, "low"),
    Column("E2E p99, s", ("p99_e2el_ms",), 0.001, 2, "low"),
    Column("TTFT p50, s", ("p50_ttft_ms",), 0.001, 2, "low"),
    Column("TTFT p99, s", ("p99_ttft_ms",), 0.001, 2, "low"),
    Column("ITL p99, ms", ("p99_itl_ms",), 1, 1, "low"),
    Column("goodput/s", ("request_goodput",), 1, 2, "high"),
    Column("batch fill, %", ("batch_fill",), 100, 0),
    Column("wasted rows, %", ("rows_in_vain",), 100, 0),
    Column("preemptions", ("preemptions",), 1, 0),
    Column("cached prompt tokens, %", ("hit_tokens",), 100, 0),
    Column("tokens per step", ("tokens_per_step",), 1, 2),
    Column("accepted drafts, %", ("acceptance",), 100, 0),
    Column("s per requested token", ("fairness", "slope_ms_per_token"), 0.001, 4),
    Column("r", ("fairness", "r"), 1, 3),
]
IF_ANY = ("preemptions", "cached prompt tokens, %")
SHORT = ("output tokens/s", "ms per token, mean", "E2E p50, s", "E2E p99, s", "TTFT p50, s", "TTFT p99, s",
         "ITL p99, ms")  # fmt: skip


def best(results: Results, load: str, key: str, prefer: str) -> str | None:
    """Return the policy that is clearly best: its interval touches no other."""
    spans = {p: spread(results.of(p, load), key) for p in results.policies if results.of(p, load)}
    if len(spans) < 2 or any(span is None for span in spans.values()):
        return None
    known = {p: span for p, span in spans.items() if span is not None}
    sign = 1 if prefer == "low" else -1
    first = min(known, key=lambda p: sign * sum(known[p]))
    clear = all(known[first][1] < s[0] if sign > 0 else known[first][0] > s[1] for p, s in known.items() if p != first)
    return first if clear else None


def rows(results: Results, loads: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table of some loads, one row per policy; columns without a figure are left out.

    In a table of one load the best figures are bold.
    """
    groups = [(p, load, results.of(p, load)) for p in results.policies for load in loads if results.of(p, load)]
    columns = [column for column in COLUMNS if column.is_known([runs for *_, runs in groups])]
    many = len(loads) > 1
    heads = ["policy", *(["load"] if many else []), *(column.head for column in columns)]
    lines = [
        [policy, *([load] if many else []), *(column.cell(runs) for column in columns)] for policy, load, runs in groups
    ]
    if many:
        return heads, lines
    for place, column in enumerate(columns, 1):
        winner = best(results, loads[0], column.path[0], column.better) if column.better else None
        for line in lines:
            if line[0] == winner:
                line[place] = f"**{line[place]}**"
    return heads, lines


def tables(results: Results) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return each table with its title: one for each load, or one for all steps of a sweep."""
    sweep = results.summary.get("sweep")
    if sweep and results.loads:
        ends = [f"{p} saturated at {v:g}" for p, v in sweep.get("saturation", {}).items()]
        which = seeds(results, results.runs)
        which += "" if "simulation" in results.runs[0] else ": other prompts for each value"
        heading = "; ".join([f"{results.summary.get('workload')} over {sweep['over']}, {which}", *ends])
        loads = [(heading, *rows(results, results.loads))]
    else:
        loads = [(title(results, load), *rows(results, [load])) for load in results.loads]
    return [*loads, *programs(results.runs)]


def markdown(results: Results) -> str:
    """Return all tables as Markdown."""
    parts = []
    for heading, heads, lines in tables(results):
        table = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
        parts.append(f"{heading}\n\n{text}\n")
    return "\n".join([*parts, TERMS, ""])


def short_tables(results: Results) -> list[Table]:
    """Return the tables with the columns that fit a terminal of 80 columns."""
    short = []
    for heading, heads, lines in tables(results):
        columns = [i for i, head in enumerate(heads) if head in ("policy", "load", *SHORT) or not {*SHORT} & {*heads}]
        rows = [
            [Text(cells[i].strip("*"), "bold" if cells[i].startswith("**") else "") for i in columns] for cells in lines
        ]
        short.append(table_of(heading, [heads[i] for i in columns], rows, 0, ("policy", "load"), **PLAIN))
    return short


def title(results: Results, load: str) -> str:
    """Return the title of a load's table."""
    runs = [run for run in results.runs if run["load"] == load]
    count, repeats = runs[0]["num_prompts"], 1 + max(run["repeat"] for run in runs)
    model = runs[0].get("model_id") or "the server's model"
    times = f", {repeats} times" if repeats > 1 else ""
    measured = results.summary.get("capacity", {})
    is_share = measured.get("load") == load
    share = f" ({measured['share']:.0%} of the capacity of {measured['policy']})" if is_share else ""
    return (
        f"{load}{share}: {count} requests of {results.summary.get('workload')}{times}, {model}, {seeds(results, runs)}"
    )


def seeds(results: Results, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the seeds that drew these runs, as text."""
    known = sorted({run.get("seed", results.summary.get("seed")) for run in runs})
    return f"seed {known[0]}" if len(known) == 1 else f"seeds {known[0]} to {known[-1]}"


def under(load: str) -> str:
    """Return a load as a part of a sentence."""
    kind, _, value = load.partition(":")
    if kind == "burst":
        return "in the burst"
    if kind in ("poisson", "rate"):
        return f"at {value} request{'' if value == '1' else 's'} per second"
    if kind in ("closed", "users") and ":" not in value:
        return f"with {value} user{'' if value == '1' else 's'}"
    return f"under {load}"


SAME = 0.05  # single runs that differ by less count as equal


def headline(results: Results) -> str:
    """Return the answer, a sentence for each load: latencies of an open load, throughput of one that fills the server."""
    if results.summary.get("sweep"):
        return _peaks(results)
    sentences = [text for load in results.loads if (text := _answer(results, load))]
    if not sentences:
        return "Nothing was completed."
    sentences += [why] if (why := reason(results)) else []
    counts = [len(results.of(policy, load)) for policy in results.policies for load in results.loads]
    if len(results.policies) > 1 and 0 < min(counts) < figures.MIN_RUNS:
        runs = "one run" if min(counts) == 1 else f"{min(counts)} runs"
        sentences.append(f"From {runs} each; use --repeats {figures.MIN_RUNS} to estimate the spread between runs.")
    return " ".join(sentences)


def _answer(results: Results, load: str) -> str:
    """Return how the policies differ under a load in one sentence; "" if nothing was completed."""
    full = load.partition(":")[0] in ("burst", "closed")
    key, sign = ("output_throughput", -1) if full else ("mean_e2el_ms", 1)
    values = {p: average(results.of(p, load), key) for p in results.policies if results.of(p, load)}
    known = {policy: value for policy, value in values.items() if value}
    if not known:
        return ""
    late = [p for p in known if not full and is_overloaded(results, p, load)]
    ranked = sorted((p for p in known if p not in late), key=lambda policy: sign * known[policy])
    texts = {p: f"{v:,.0f} tokens/s" if full else f"{shown(v / 1000, 2)} s" for p, v in known.items()}
    what = "output tokens per second" if full else "mean latency"
    start = under(load)[:1].upper() + under(load)[1:]
    behind = f"{' and '.join(late)} cannot keep up with the arrivals"
    if not ranked:
        return f"{start}, {behind}."
    first, *others = ranked
    if not others and not late:
        return f"{start}, {first} has {texts[first]}{'' if full else f' {what}'}."
    shares = {p: value / known[first] for p, value in known.items()}
    factors = {p: f" ({s:.0%} of that)" if full else f" ({s:.1f} times as long)" for p, s in shares.items()}
    level = [p for p in others if not differ(results, load, key, first, p)]
    rest = ", ".join(f"{p} {texts[p]}{factors[p]}" for p in others if p not in level)
    rest = (f"; {rest}" if rest else "") + (f"; {behind}" if late else "")
    if level:
        measure = "throughputs" if full else "mean latencies"
        pairs = " and ".join(f"{p} ({texts[p]})" for p in (first, *level))
        once = " with one run" if min(len(results.of(p, load)) for p in (first, *level)) == 1 else ""
        return f"{start}, the {measure} of {pairs} are not distinguishable{once}{rest}."
    best_is = "the most" if full else "the lowest"
    return f"{start}, {first} has {best_is} {what}, {texts[first]}{rest}."


def is_overloaded(results: Results, policy: str, load: str) -> bool:
    """Return whether requests came faster than the policy completed them in most runs: latency then shows how long these were."""
    runs = [results.whole(run) or run for run in results.of(policy, load)]
    return 2 * sum(figures.is_overloaded(run, run.get("e2els") or []) for run in runs) > len(runs)


def reason(results: Results) -> str:
    """Report which rows the most wasteful policy wasted, under the load where it wasted most; "" if none did."""
    shares = {
        (p, load): average(results.of(p, load), "rows_in_vain") or 0.0 for p in results.policies for load in results.loads
    }  # fmt: skip
    (policy, load), share = max(shares.items(), key=lambda pair: pair[1], default=(("", ""), 0.0))
    if share < 0.005:
        return ""
    steps = results.of(policy, load)[0].get("slot_steps") or {}
    kind = max(WHY, key=lambda kind: steps.get(kind, 0.0))
    return f"{share:.0%} of the rows that {policy} computed {under(load)} were wasted, most of them {WHY[kind]}."


WHY = {
    "held": "on requests that had finished and kept their slots until the rest of their batch was done",
    "padding": "on padding of shorter prompts",
    "recomputed": "on tokens that were computed again after a preemption",
    "rejected": "on draft tokens that were rejected",
}


def differ(results: Results, load: str, key: str, one: str, two: str) -> bool:
    """Return whether two policies differ: their intervals do not overlap, and single runs by 5 % at least."""
    both = [results.of(policy, load) for policy in (one, two)]
    a, b = (average(runs, key) or 0.0 for runs in both)
    few = min(map(len, both)) < figures.MIN_RUNS
    if few and abs(a - b) < SAME * max(a, b):
        return False
    spans = [spread(runs, key) for runs in both]
    if spans[0] is None or spans[1] is None:
        return few
    return spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]


def _peaks(results: Results) -> str:
    """Return the highest throughput of each policy in a sweep, and whether it was still rising."""
    limits = results.summary["sweep"].get("saturation", {})
    most = []
    for policy in results.policies:
        rates = {load: average(results.of(policy, load), "output_throughput") for load in results.loads}
        reached = {load: rate for load, rate in rates.items() if rate}
        if reached:
            top, last = max(reached, key=lambda load: reached[load]), [*reached.values()][-2:]
            rises = policy not in limits and len(last) == 2 and last[1] > (1 + SAME) * last[0] and top == [*reached][-1]
            end = " and still rising" if rises else ""
            most.append(f"{policy} {shown(reached[top], 0)} tokens/s {under(top)}{end}")
    return f"Highest throughput: {', '.join(most)}." if most else "Nothing was completed."
