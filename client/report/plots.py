"""The plots of a comparison, one function each, from the client's measurements.

They draw what the data allow and leave out the rest. Each also writes its points as CSV.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import figures, plots_requests, plots_steps, plots_sweep
from .album import BOTTOM, Album, Picture, finish
from .store import Results
from .summary import average, spread
from .waste import COLORS

MAX_BARS = 16


def latency_over_tokens(album: Album, load: str) -> None:
    """Draw latency over requested tokens: the original's plot."""
    policies = album.policies(load)
    if not policies:
        return
    columns = ["policy", "asked_tokens", "latency_s"]
    points = {p: album.results.pairs(p, load, "asked_tokens", "latency_s") for p in policies}
    with album.draw("latency-over-tokens", "Latency over requested tokens", columns, load=load) as ((axes,), rows):
        for policy, pairs in points.items():
            x, y = zip(*pairs)
            look = album.look(policy)
            if line := figures.fit(x, y):
                slope, intercept, _ = line
                ends = np.array([min(x), max(x)])
                axes.plot(ends, intercept + slope * ends, color=look["color"], linestyle=look["linestyle"])
            axes.scatter(x, y, s=14, alpha=0.6, color=look["color"], marker=look["marker"], label=policy)
            rows += [[policy, *pair] for pair in pairs]
        finish(axes, "requested tokens", "latency (s)")


def latency_cdf(album: Album) -> None:
    """Draw the share of requests answered within a time, for each load side by side: Anyscale's plot."""
    loads = [load for load in album.results.loads if album.policies(load)]
    if len(loads) > 2:
        loads = [loads[0], loads[-1]]
    if not loads:
        return
    count, columns = sum(map(album.requests, loads)), ["load", "policy", "latency_s", "share"]
    title = "Share of requests answered within a time"
    with album.draw("latency-cdf", title, columns, count=count, across=len(loads)) as (grid, rows):
        for axes, load in zip(grid, loads):
            for policy in album.policies(load):
                values = sorted(album.results.column(policy, load, "latency_s"))
                share = np.arange(1, len(values) + 1) / len(values)
                axes.step(values, share * 100, where="post", label=policy, **album.line(policy))
                rows += [[load, policy, v, s] for v, s in zip(values, share)]
            axes.set_title(load, fontsize=9)
            axes.set_xscale("log")
            finish(axes, "latency (s)", "requests (%)" if axes is grid[0] else "")


def distributions(album: Album, load: str) -> None:
    """Draw TTFT and ITL as cumulative curves; only for streamed answers."""
    series: dict[str, dict[str, list[float]]] = {"TTFT": {}, "ITL": {}}
    for policy in album.policies(load):
        series["TTFT"][policy] = album.results.column(policy, load, "ttft_s")
        gaps = album.results.arrays(policy, load, "itls")
        series["ITL"][policy] = [gap for request in gaps for gap in request]
    if not any(series["TTFT"].values()):
        return
    count, columns = sum(map(len, series["TTFT"].values())), ["measure", "policy", "percentile", "seconds"]
    title = "Time to first token, and between tokens"
    with album.draw("ttft-itl", title, columns, load=load, count=count, across=2) as (grid, rows):
        share = np.linspace(0, 100, 201)
        for axes, (measure, by_policy) in zip(grid, series.items()):
            for policy, values in by_policy.items():
                if not values:
                    continue
                points = np.maximum(np.percentile(values, share), 1e-4)
                axes.plot(points, share, label=policy, **album.line(policy))
                rows += [[measure, policy, s, p] for s, p in zip(share, points)]
            axes.set_xscale("log")
            finish(axes, f"{measure} (s)", "share (%)" if axes is grid[0] else "")


def percentiles(album: Album, load: str) -> None:
    """Draw p50 and p99 of E2E, TTFT, TPOT and ITL as bars, with the interval if there is one."""
    policies = album.policies(load)
    measures = [
        (name, key)
        for name, key in (("E2E", "e2el"), ("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"))
        if any(average(album.results.of(p, load), f"p99_{key}_ms") is not None for p in policies)
    ]
    if not measures:
        return
    columns = ["policy", "measure", "p50_ms", "p99_ms"]
    with album.draw("percentiles", "p50 and p99 of the times", columns, load=load) as ((axes,), rows):
        width = 0.8 / len(policies)
        for i, policy in enumerate(policies):
            runs, color = album.results.of(policy, load), album.look(policy)["color"]
            for j, (measure, key) in enumerate(measures):
                p50, p99 = (average(runs, f"p{q}_{key}_ms") for q in (50, 99))
                x = j + (i - (len(policies) - 1) / 2) * width
                axes.bar(x, p99 or 0, width * 0.9, color=color, alpha=0.35)
                axes.bar(x, p50 or 0, width * 0.9, color=color, label=policy if j == 0 else None)
                if span := spread(runs, f"p99_{key}_ms"):
                    axes.vlines(x, *span, color="#000000", linewidth=1)
                rows.append([policy, measure, p50, p99])
        axes.set_xticks(range(len(measures)), [measure for measure, _ in measures])
        axes.set_yscale("log")
        lines = "; black line: its 95 % interval" if axes.collections else ""
        finish(axes, f"solid: p50, pale: p99{lines}", "ms", zero=False)


def in_system(album: Album, load: str) -> None:
    """Draw the requests that were sent and not yet answered over time."""
    levels = {p: level(album.results.lines(p, load)) for p in album.policies(load)}
    if not levels:
        return
    title, columns = "Requests in the system (waiting or running)", ["policy", "seconds", "requests"]
    with album.draw("in-system", title, columns, load=load) as ((axes,), rows):
        for policy, steps in levels.items():
            axes.step(*zip(*steps), where="post", label=policy, **album.line(policy))
            rows += [[policy, *step] for step in steps]
        finish(axes, "time since the first arrival (s)", "requests")


def level(lines: list[dict[str, str]]) -> list[tuple[float, int]]:
    """Return the times at which the number of open requests changes in the first run, and this number."""
    first = [(float(r["arrival_s"]), float(r["latency_s"])) for r in lines if r["repeat"] == "0"]
    steps = sorted([(at, 1) for at, _ in first] + [(at + latency, -1) for at, latency in first])
    return list(zip([t for t, _ in steps], np.cumsum([d for _, d in steps]).tolist()))


def batch_histogram(album: Album, load: str) -> None:
    """Draw the share of steps by batch size, as counted by the server."""
    batches = {
        p: runs[0]["batch_stats"]
        for p in album.results.policies
        if (runs := album.results.of(p, load)) and runs[0].get("batch_stats")
    }
    if not batches:
        return
    steps = sum(sum(b.values()) for b in batches.values())
    groups = ranges(max(int(size) for sizes in batches.values() for size in sizes))
    title, columns = "Steps by batch size", ["policy", "batch_size", "steps"]
    with album.draw("batch-sizes", title, columns, load=load, count=steps, unit="steps") as ((axes,), rows):
        width = 0.84 / len(batches)
        for i, (policy, sizes) in enumerate(batches.items()):
            counts = [sum(n for size, n in sizes.items() if int(size) in group) for group in groups]
            x = np.arange(len(groups)) + (i - (len(batches) - 1) / 2) * width
            share = 100 * np.array(counts) / sum(counts)
            axes.bar(x, share, width, label=policy, color=album.look(policy)["color"])
            rows += [[policy, size, sizes[str(size)]] for size in sorted(map(int, sizes))]
        names = [f"{g[0]}" if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups]
        axes.set_xticks(range(len(groups)), names, fontsize=8 if len(names[-1]) < 3 else 7)
        finish(axes, "requests in the batch", "steps of the policy (%)")


def ranges(most: int) -> list[range]:
    """Return at most `MAX_BARS` ranges of equal width that cover 1 to `most`."""
    width = -(-most // MAX_BARS)
    return [range(first, min(first + width, most + 1)) for first in range(1, most + 1, width)]


def waste(album: Album) -> None:
    """Draw how the slots were used, stacked to 100 %: of all slots, and of the rows that were computed."""
    spent = [
        (f"{p}, {load}", runs[0]["slot_steps"])
        for load in album.results.loads
        for p in album.results.policies
        if (runs := album.results.of(p, load)) and sum((runs[0].get("slot_steps") or {}).values())
    ]
    if not spent:
        return
    total = round(sum(sum(steps.values()) for _, steps in spent))
    columns = ["of", "run", *COLORS]
    title, unit = "Use of the slots", "slot-steps"
    with album.draw("waste", title, columns, count=total, unit=unit, across=2) as (grid, rows):
        parts: list[tuple[str, list[str]]] = [("slots", list(COLORS)), ("rows", [k for k in COLORS if k != "idle"])]
        for axes, (whole, kinds) in zip(grid, parts):
            totals = np.array([sum(s.get(kind, 0) for kind in kinds) or 1 for _, s in spent])
            base = np.zeros(len(spent))
            for kind in kinds:
                share = 100 * np.array([s.get(kind, 0) for _, s in spent]) / totals
                axes.barh(range(len(spent)), share, left=base, color=COLORS[kind], label=kind, height=0.7)
                base += share
            for (name, s), all in zip(spent, totals):
                rows.append([whole, name, *(s.get(k, 0) / all if k in kinds else "" for k in COLORS)])
            axes.xaxis.set_major_formatter("{x:g} %")
            axes.set_xlim(0, 100)
            axes.set_xticks([0, 50, 100])
            axes.spines[["top", "right"]].set_visible(False)
        grid[0].set_yticks(range(len(spent)), [name for name, _ in spent], fontsize=8 if len(spent) < 13 else 5)
        grid[0].invert_yaxis()  # of both, which share it
        grid[0].set_title("all slots (batch fill: not idle)", fontsize=9)
        grid[1].set_title("rows computed (wasted: not useful)", fontsize=9)
        known = grid[0].get_legend_handles_labels()
        grid[0].figure.legend(
            *known, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, BOTTOM), ncols=len(COLORS), frameon=False
        )


def draw_all(results: Results) -> list[Picture]:
    """Draw every plot that the data allow; return the pictures."""
    album = Album(results)
    comparison: list[Callable[[Album], None]] = [
        _by_load(latency_over_tokens), latency_cdf, _by_load(plots_steps.slots), _by_load(plots_steps.over_time), waste,
        _by_load(distributions), _by_load(plots_requests.ttft_over_prompt),
        _by_load(plots_requests.simulated_over_measured), _by_load(plots_requests.blame), _by_load(plots_requests.program_times),
        _by_load(percentiles), _by_load(in_system),
        _by_load(batch_histogram),
    ]  # fmt: skip
    sweep = [plots_sweep.throughput_latency, plots_sweep.curves, plots_sweep.curves_over_slots, latency_cdf]
    if results.runs:
        for plot in sweep if results.summary.get("sweep") else comparison:
            plot(album)
    return album.pictures


def _by_load(plot: Callable[[Album, str], None]) -> Callable[[Album], None]:
    def draw(album: Album) -> None:
        for load in album.results.loads:
            plot(album, load)

    return draw
