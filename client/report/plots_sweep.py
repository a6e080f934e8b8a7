"""Plots of a sweep: throughput and latency over the value that grows, with 95 % bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from . import summary
from .album import BOTTOM, Album, finish

AXES = {"rate": "offered requests/s", "users": "users (closed loop)"}
# Key in a run (of a time, p50 and p99 are drawn), title, label of the axis and scale of each figure.
FIGURES = [
    ("ttft_ms", "Time to first token", "TTFT (s)", 0.001),
    ("itl_ms", "Time between two tokens", "ITL (ms)", 1.0),
    ("e2el_ms", "Latency", "latency (s)", 0.001),
    ("tpot_ms", "Time per token after the first", "TPOT (ms)", 1.0),
    ("output_throughput", "Throughput", "output tokens/s", 1.0),
    ("request_goodput", "Goodput", "requests/s within limits", 1.0),
    ("hit_tokens", "Prompt tokens from the cache", "prompt tokens (%)", 100.0),
    ("tokens_per_step", "Tokens of a request in a step", "tokens per step", 1.0),
    ("acceptance", "Accepted draft tokens", "accepted (%)", 100.0),
]
ACROSS = 3


def keys_of(key: str) -> list[str]:
    """Return the keys that a figure has in a run."""
    return [f"p50_{key}", f"p99_{key}"] if key.endswith("_ms") else [key]


def series(album: Album, policy: str, key: str) -> list[list[Any]]:
    """Return value, mean, low and high (the mean where no interval is known), and the number of runs of a policy, sorted by value."""
    runs = [run for run in album.results.runs if run["policy"] == policy and run.get("value") is not None]
    groups = [[run for run in runs if run["value"] == value] for value in sorted({run["value"] for run in runs})]
    return [
        [float(some[0]["value"]), mean, *(summary.spread(some, key) or (mean, mean)), len(some)]
        for some in groups
        if (mean := summary.average(some, key)) is not None
    ]


def known(album: Album) -> list[tuple[str, str, str, float]]:
    """Return the figures that the runs of a sweep have."""
    return [each for each in FIGURES if any(series(album, p, keys_of(each[0])[0]) for p in album.results.policies)]


def overview(album: Album) -> None:
    """Draw all figures in one picture, and write their points in the units that the keys name."""
    shown = known(album)
    if shown:
        points: list[list[Any]] = [["policy", "value", "figure", "mean", "low", "high", "runs"]]
        for key in (key for each in shown for key in keys_of(each[0])):
            for p in album.results.policies:
                points += [[p, value, key, *rest] for value, *rest in series(album, p, key)]
        count = sum(r["num_prompts"] for r in album.results.runs)
        title = f"{album.results.summary.get('workload')}; bands: 95 % over runs; dotted: saturated"
        down = -(-len(shown) // ACROSS)
        with album.draw("sweep", title, count=count, across=ACROSS, down=down, points=points) as grid:
            panels(album, grid)


def panels(album: Album, grid: Sequence[Axes]) -> None:
    """Draw each figure on axes of its own, over the swept values; saturation is marked."""
    shown, sweep = known(album), album.results.summary["sweep"]
    for axes, (key, title, label, scale) in zip(grid, shown):
        keys = keys_of(key)
        for policy in album.results.policies:
            look = album.look(policy)
            for part, style in zip(keys, ("-", "--")):
                points = series(album, policy, part)
                values, mean, low, high = ([(scale if i else 1) * point[i] for point in points] for i in range(4))
                curve = f"{policy} {part[:3]}" if len(keys) > 1 else policy
                axes.plot(values, mean, label=curve, markersize=4, **look | {"linestyle": style})
                axes.fill_between(values, low, high, color=look["color"], alpha=0.15, linewidth=0)
            if (limit := sweep.get("saturation", {}).get(policy)) is not None:
                axes.axvline(limit, color=look["color"], linewidth=0.8, linestyle=":")
        axes.set_title(title, fontsize=9)
        axes.set_xscale("log", base=2)
        if len(keys) > 1:
            axes.set_yscale("log")
        finish(axes, AXES[sweep["over"]], label, zero=len(keys) == 1)
        if legend := axes.get_legend():
            legend.remove()
    for axes in grid[len(shown) :]:
        axes.set_axis_off()
    grid[0].figure.legend(
        *grid[0].get_legend_handles_labels(), fontsize=8, handlelength=3, frameon=False, loc="lower center",
        bbox_to_anchor=(0.5, BOTTOM / 2), ncols=6,
    )  # fmt: skip


def throughput_latency(album: Album) -> None:
    """Draw latency over throughput, the field's usual plot."""
    if not known(album):
        return
    count = sum(run["num_prompts"] for run in album.results.runs)
    with album.draw("throughput-latency", "Latency over throughput", count=count) as (axes,):
        for policy in album.results.policies:
            for key, style in (("p50_e2el_ms", "-"), ("p99_e2el_ms", "--")):
                points = [*zip(series(album, policy, "output_throughput"), series(album, policy, key))]
                label = f"{policy} {key[:3]}"
                axes.plot(
                    [x[1] for x, _ in points], [y[1] / 1000 for _, y in points], markersize=4, label=label,
                    **album.look(policy) | {"linestyle": style},
                )  # fmt: skip
                for x, y in points:
                    if style == "-" and x[0] == album.results.summary["sweep"].get("saturation", {}).get(policy):
                        axes.annotate("saturated", (x[1], y[1] / 1000), fontsize=7)
        axes.set_yscale("log")
        finish(axes, "output tokens/s", "latency (s)", zero=False)
