"""Plots of a sweep: throughput and latency over the value that grows."""

from __future__ import annotations

from typing import Any

from .album import Album, finish

AXES = {"rate": "offered requests per second", "users": "concurrent users (closed loop)"}
# Name, key in a run, title, label of the axis and scale of each figure.
FIGURES = [
    ("throughput", "output_throughput", "Throughput", "output tokens/s", 1.0),
    ("e2el", "e2el_ms", "Latency", "latency (s)", 0.001),
    ("ttft", "ttft_ms", "Time to first token", "TTFT (s)", 0.001),
    ("tpot", "tpot_ms", "Time per token after the first", "TPOT (ms)", 1.0),
    ("hits", "hit_tokens", "Prompt tokens from the cache", "prompt tokens (%)", 100.0),
    ("tokens-per-step", "tokens_per_step", "Tokens of a request in a step", "tokens per step", 1.0),
    ("acceptance", "acceptance", "Accepted draft tokens", "accepted (%)", 100.0),
]


def curves(album: Album) -> None:
    """Draw each figure over the swept values, times as p50 and p99; saturation is marked."""
    sweep = album.results.summary["sweep"]
    axis = AXES[sweep["over"]]
    count = sum(r["num_prompts"] for r in album.results.runs)
    for name, key, title, label, scale in FIGURES:
        keys = [key] if not key.endswith("_ms") else [f"p50_{key}", f"p99_{key}"]
        points = {p: series(album, p, keys) for p in album.results.policies}
        points = {p: rows for p, rows in points.items() if rows}
        if not points:
            continue
        with album.draw(f"sweep-{name}", f"{title} over {axis}", count=count) as (axes,):
            for policy, line in points.items():
                swept = [row[0] for row in line]
                for i, (part, style) in enumerate(zip(keys, ("-", "--")), 1):
                    values = [scale * row[i] for row in line]
                    curve = f"{policy} {part[:3]}" if len(keys) > 1 else policy
                    axes.plot(swept, values, label=curve, markersize=4, **album.look(policy) | {"linestyle": style})
                limit = sweep.get("saturation", {}).get(policy)
                if limit is not None:
                    axes.axvline(limit, color=album.look(policy)["color"], linewidth=0.8, linestyle=":")
            axes.set_xscale("log", base=2)
            if len(keys) > 1:
                axes.set_yscale("log")
            finish(axes, axis + ("; dotted: saturated" if sweep.get("saturation") else ""), label, zero=len(keys) == 1)


def series(album: Album, policy: str, keys: list[str]) -> list[tuple[float, ...]]:
    """Return (value, figure ...) of a policy's runs, sorted; runs without one of the figures are left out."""
    rows: list[tuple[float, ...]] = []
    for run in album.results.runs:
        numbers: list[Any] = [run.get(key) for key in keys]
        if run["policy"] == policy and None not in numbers and run.get("value") is not None:
            rows.append((float(run["value"]), *map(float, numbers)))
    return sorted(rows)


def throughput_latency(album: Album) -> None:
    """Draw latency over throughput, the field's usual plot."""
    sweep = album.results.summary["sweep"]
    keys = ["output_throughput", "p50_e2el_ms", "p99_e2el_ms"]
    points = {p: series(album, p, keys) for p in album.results.policies}
    if not any(points.values()):
        return
    count = sum(run["num_prompts"] for run in album.results.runs)
    with album.draw("throughput-latency", "Latency over throughput", count=count) as (axes,):
        for policy, line in points.items():
            look = album.look(policy)
            for i, style in ((2, "-"), (3, "--")):
                axes.plot(
                    [row[1] for row in line], [row[i] / 1000 for row in line], markersize=4,
                    label=f"{policy} {'p50' if i == 2 else 'p99'}", **{**look, "linestyle": style},
                )  # fmt: skip
            limit = sweep.get("saturation", {}).get(policy)
            for row in line:
                if row[0] == limit:
                    axes.annotate("saturated", (row[1], row[2] / 1000), fontsize=7)
        axes.set_yscale("log")
        finish(axes, "output tokens/s", "latency (s)", zero=False)
