"""The plots of a comparison, one function each, from the client's measurements.

They draw what the data allow and leave out the rest.
"""

from __future__ import annotations

import numpy as np

from . import figures, plots_requests, plots_steps, plots_sweep
from .album import BOTTOM, Album, Picture, finish
from .store import Results
from .waste import COLORS


def latency_over_tokens(album: Album, load: str) -> None:
    """Draw latency over requested tokens, and the lines that fit it: the original's plot."""
    points = {p: album.results.pairs(p, load, "asked_tokens", "latency_s") for p in album.policies(load)}
    if not points:
        return
    with album.draw("latency-over-tokens", "Latency over requested tokens", load=load) as (axes,):
        for policy, pairs in points.items():
            lengths = np.array([min(pairs)[0], max(pairs)[0]])
            if line := figures.fit(*zip(*pairs)):
                axes.plot(lengths, line[1] + line[0] * lengths, **album.line(policy))
            plots_requests.scatter(axes, album, policy, pairs, policy)
        finish(axes, "requested tokens", "latency (s)")


def in_system(album: Album, load: str) -> None:
    """Draw the requests that were sent and not yet answered over time."""
    levels = {p: level(album.results.lines(p, load)) for p in album.policies(load)}
    if not levels:
        return
    with album.draw("in-system", "Requests in the system (waiting or running)", load=load) as (axes,):
        for policy, steps in levels.items():
            axes.step(*zip(*steps), where="post", label=policy, **album.line(policy))
        finish(axes, "time since the first arrival (s)", "requests")


def level(lines: list[dict[str, str]]) -> list[tuple[float, int]]:
    """Return the times at which the number of open requests changes in the first run, and this number."""
    first = [(float(r["arrival_s"]), float(r["latency_s"])) for r in lines if r["repeat"] == "0"]
    steps = sorted([(at, 1) for at, _ in first] + [(at + latency, -1) for at, latency in first])
    return list(zip([t for t, _ in steps], np.cumsum([d for _, d in steps]).tolist()))


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
    title, unit = "Use of the slots", "slot-steps"
    with album.draw("waste", title, count=total, unit=unit, across=2) as grid:
        for axes, kinds in zip(grid, ([*COLORS], [kind for kind in COLORS if kind != "idle"])):
            totals = np.array([sum(s.get(kind, 0) for kind in kinds) or 1 for _, s in spent])
            base = np.zeros(len(spent))
            for kind in kinds:
                share = 100 * np.array([s.get(kind, 0) for _, s in spent]) / totals
                axes.barh(range(len(spent)), share, left=base, color=COLORS[kind], label=kind, height=0.7)
                base += share
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


OF_SWEEPS = (plots_sweep.overview, plots_sweep.throughput_latency, plots_requests.latency_cdf)
OF_COMPARISONS = (plots_requests.latency_cdf, waste)
OF_LOADS = (
    latency_over_tokens, plots_steps.slots, plots_steps.over_time, plots_requests.distributions,
    plots_requests.ttft_over_prompt, plots_requests.simulated_over_measured, plots_requests.blame,
    plots_requests.program_times, in_system,
)  # fmt: skip


def draw_all(results: Results) -> list[Picture]:
    """Draw every plot that the data allow; return the pictures."""
    album, is_sweep = Album(results), "sweep" in results.summary
    for draw in OF_SWEEPS if is_sweep else OF_COMPARISONS:
        draw(album)
    for draw_load in () if is_sweep else OF_LOADS:
        for load in results.loads:
            draw_load(album, load)
    return album.pictures
