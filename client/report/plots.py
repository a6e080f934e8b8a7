"""The pictures of a comparison, one function each, of what the client measured.

It reads a folder that `store` wrote and draws what the data allow; what is missing is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from . import figures, plots_requests, plots_steps, plots_sweep
from .album import Album, Picture, finish
from .store import Results, slug
from .summary import average

KINDS = {"useful": "#009E73", "padding": "#F0E442", "held": "#D55E00", "idle": "#DDDDDD", "recomputed": "#CC79A7"}


def latency_over_tokens(album: Album) -> None:
    """Latency against requested tokens for each policy: the original's picture."""
    for load in album.results.loads:
        policies = album.pairs(load)
        if not policies:
            continue
        count = sum(len(album.results.lines(p, load)) for p in policies)
        with album.draw(f"latency-over-tokens.{slug(load)}", f"Latency over requested tokens, {load}", count) as (
            (axes,),
            rows,
        ):
            rows.append(["policy", "asked_tokens", "latency_s"])
            for policy in policies:
                x = album.results.column(policy, load, "asked_tokens")
                y = album.results.column(policy, load, "latency_s")
                look = album.look(policy)
                line = figures.fit(x, y)
                said = policy
                if line:
                    slope, intercept, r = line
                    said += f": {intercept:.2f} s + {slope * 1000:.1f} ms/token, r = {r:.2f}"
                    ends = np.array([min(x), max(x)])
                    axes.plot(ends, intercept + slope * ends, color=look["color"], linestyle=look["linestyle"])
                axes.scatter(x, y, s=14, alpha=0.6, color=look["color"], marker=look["marker"], label=said)
                rows += [[policy, a, b] for a, b in zip(x, y)]
            finish(axes, "requested tokens", "latency (s)")


def latency_cdf(album: Album) -> None:
    """The share of requests answered within a time, at each load side by side: Anyscale's picture."""
    loads = [load for load in album.results.loads if album.pairs(load)]
    if len(loads) > 3:
        loads = [loads[0], loads[-1]]
    if not loads:
        return
    count = sum(len(album.results.lines(p, load)) for load in loads for p in album.pairs(load))
    with album.draw("latency-cdf", "Share of requests answered within", count, len(loads)) as (grid, rows):
        rows.append(["load", "policy", "latency_s", "share"])
        for axes, load in zip(grid, loads):
            for policy in album.pairs(load):
                values = sorted(album.results.column(policy, load, "latency_s"))
                share = np.arange(1, len(values) + 1) / len(values)
                look = {**album.look(policy), "marker": None}
                axes.step(values, share * 100, where="post", label=policy, **look)
                rows += [[load, policy, v, s] for v, s in zip(values, share)]
            axes.set_title(load, fontsize=9)
            finish(axes, "latency (s)", "requests (%)" if axes is grid[0] else "")


def distributions(album: Album) -> None:
    """TTFT and ITL of each policy as cumulative curves; only where answers streamed."""
    for load in album.results.loads:
        series: dict[str, dict[str, list[float]]] = {"TTFT": {}, "ITL": {}}
        for policy in album.pairs(load):
            series["TTFT"][policy] = album.results.column(policy, load, "ttft_s")
            gaps = album.results.arrays(policy, load, "itls")
            series["ITL"][policy] = [gap for request in gaps for gap in request]
        if not any(series["TTFT"].values()):
            continue
        count = sum(map(len, series["TTFT"].values()))
        title = f"Time to first token, and between chunks, {load}"
        with album.draw(f"ttft-itl.{slug(load)}", title, count, 2) as (grid, rows):
            rows.append(["measure", "policy", "percentile", "seconds"])
            for axes, (name, by_policy) in zip(grid, series.items()):
                for policy, values in by_policy.items():
                    if not values:
                        continue
                    share = np.linspace(0, 100, 201)
                    points = np.maximum(np.percentile(values, share), 1e-5)
                    axes.plot(points, share, label=policy, **{**album.look(policy), "marker": None})
                    rows += [[name, policy, s, p] for s, p in zip(share, points)]
                axes.set_xscale("log")
                finish(axes, f"{name} (s)", "share (%)" if axes is grid[0] else "")


def percentiles(album: Album) -> None:
    """E2E, TTFT and ITL: p50 and p99 as bars, with the interval where there is one."""
    for load in album.results.loads:
        policies = album.pairs(load)
        measures = [
            (name, key)
            for name, key in (("E2E", "e2el"), ("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"))
            if any(average(album.results.of(p, load), f"p99_{key}_ms") is not None for p in policies)
        ]
        if not measures:
            continue
        count = sum(len(album.results.lines(p, load)) for p in policies)
        with album.draw(f"percentiles.{slug(load)}", f"p50 and p99, {load}", count) as ((axes,), rows):
            rows.append(["policy", "measure", "p50_ms", "p99_ms"])
            width = 0.8 / len(policies)
            for i, policy in enumerate(policies):
                runs, colour = album.results.of(policy, load), album.look(policy)["color"]
                for j, (name, key) in enumerate(measures):
                    p50, p99 = (average(runs, f"p{q}_{key}_ms") for q in (50, 99))
                    place = j + (i - (len(policies) - 1) / 2) * width
                    axes.bar(place, p99 or 0, width * 0.9, color=colour, alpha=0.35)
                    axes.bar(place, p50 or 0, width * 0.9, color=colour, label=policy if j == 0 else None)
                    _whisker(axes, place, runs, f"p99_{key}_ms")
                    rows.append([policy, name, p50, p99])
            axes.set_xticks(range(len(measures)), [name for name, _ in measures])
            axes.set_yscale("log")
            finish(axes, "solid: p50, pale: p99 with its 95 % interval", "ms", zero=False)


def _whisker(axes: Axes, place: float, runs: list[dict[str, Any]], key: str) -> None:
    if len(runs) == 1 and (span := (runs[0].get("intervals") or {}).get(key)):
        axes.vlines(place, span[0], span[1], color="#333333", linewidth=1)


def in_system(album: Album) -> None:
    """Requests sent and not answered yet over time, as the client sees them."""
    for load in album.results.loads:
        policies = album.pairs(load)
        if not policies:
            continue
        count = sum(len(album.results.lines(p, load)) for p in policies)
        title = f"Requests in the system (waiting or running), {load}"
        with album.draw(f"in-system.{slug(load)}", title, count) as ((axes,), rows):
            rows.append(["policy", "seconds", "requests"])
            for policy in policies:
                lines = [r for r in album.results.lines(policy, load) if r["repeat"] == "0"]
                begins = [float(r["arrival_s"]) for r in lines]
                ends = [float(r["arrival_s"]) + float(r["latency_s"]) for r in lines]
                steps = sorted([(t, 1) for t in begins] + [(t, -1) for t in ends])
                times, level = [t for t, _ in steps], np.cumsum([d for _, d in steps])
                axes.step(times, level, where="post", label=policy, **{**album.look(policy), "marker": None})
                rows += [[policy, t, n] for t, n in zip(times, level)]
            finish(axes, "time since the first arrival (s)", "requests")


def batch_histogram(album: Album) -> None:
    """How many steps had which batch size, from the server's own count."""
    for load in album.results.loads:
        found = {
            p: runs[0]["batch_stats"]
            for p in album.results.policies
            if (runs := album.results.of(p, load)) and runs[0].get("batch_stats")
        }
        if not found:
            continue
        steps = sum(sum(b.values()) for b in found.values())
        title = f"Steps by batch size, {load}"
        with album.draw(f"batch-sizes.{slug(load)}", title, steps, unit="steps") as ((axes,), rows):
            rows.append(["policy", "batch_size", "steps"])
            for policy, sizes in found.items():
                x = sorted(int(size) for size in sizes)
                y = [sizes[str(size)] for size in x]
                look = album.look(policy)
                axes.plot(x, y, markersize=4, label=policy, **look)
                rows += [[policy, a, b] for a, b in zip(x, y)]
            axes.set_yscale("log")
            finish(axes, "requests in the batch", "steps", zero=False)


def waste(album: Album) -> None:
    """How the slots were spent: useful, padding, held, idle, recomputed, stacked to 100 %."""
    found = [
        (f"{p}\n{load}", runs[0]["slot_steps"])
        for load in album.results.loads
        for p in album.results.policies
        if (runs := album.results.of(p, load)) and runs[0].get("slot_steps")
    ]
    found = [(name, steps) for name, steps in found if sum(steps.values())]
    if not found:
        return
    total = round(sum(sum(steps.values()) for _, steps in found))
    with album.draw("waste", "How the slots were spent", total, unit="slot-steps") as ((axes,), rows):
        rows.append(["run", *KINDS])
        base = np.zeros(len(found))
        for kind, colour in KINDS.items():
            share = np.array([100 * s.get(kind, 0) / sum(s.values()) for _, s in found])
            axes.bar(range(len(found)), share, bottom=base, color=colour, label=kind, width=0.7)
            base += share
        for name, s in found:
            rows.append([name.replace("\n", " "), *(s.get(k, 0) / sum(s.values()) for k in KINDS)])
        axes.set_xticks(range(len(found)), [name for name, _ in found], fontsize=7)
        axes.set_ylabel("slot-steps (%)")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def draw_all(results: Results) -> list[Picture]:
    """Draw every picture that the data allow; give what was drawn."""
    album = Album(results, [])
    every: list[Callable[[Album], None]] = [
        latency_over_tokens, latency_cdf, *plots_sweep.ALL, *plots_steps.ALL, waste, distributions,
        *plots_requests.ALL, percentiles, in_system, batch_histogram,
    ]  # fmt: skip
    if not results.runs:
        return []
    if results.summary.get("sweep"):
        every = [*plots_sweep.ALL, latency_cdf]
    for picture in every:
        picture(album)
    return album.pictures
