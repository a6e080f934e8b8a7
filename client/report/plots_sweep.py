"""Plots of a sweep: throughput and latency over the value that grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import sentences
from .album import Album, finish

AXES = {
    "rate": "offered requests per second",
    "users": "concurrent users (closed loop)",
    "batch": "slots (--max-batch-size)",
    "variance": "standard deviation of the output lengths (tokens)",
    "cache": "memory for KV pages (MiB)",
    "speculate": "draft tokens in a step for each request",
}
AUTO = 99.0  # of client/sweep.py
TEXTS: dict[str, Callable[[float], str]] = {
    "output tokens/s": "{:,.0f} tokens/s".format, "latency (s)": sentences.seconds, "TTFT (s)": sentences.seconds,
    "prompt tokens (%)": "{:.0f}%".format, "tokens per step": "{:.2f}".format, "accepted (%)": "{:.0f}%".format,
}  # fmt: skip


def curves(album: Album) -> None:
    """Draw throughput, p50 and p99 over the swept values; saturation is marked."""
    sweep = album.results.summary["sweep"]
    axis = AXES[sweep["over"]]
    figures = [("throughput", "output_throughput", "Throughput", "output tokens/s", 1.0),
               ("e2el", "e2el_ms", "Latency", "latency (s)", 0.001),
               ("ttft", "ttft_ms", "Time to first token", "TTFT (s)", 0.001),
               ("hits", "hit_tokens", "Prompt tokens from the cache", "prompt tokens (%)", 100.0),
               ("tokens-per-step", "tokens_per_step", "Tokens of a request in a step", "tokens per step", 1.0),
               ("acceptance", "acceptance", "Accepted draft tokens", "accepted (%)", 100.0)]  # fmt: skip
    for name, key, measure, label, scale in figures:
        keys = [key] if not key.endswith("_ms") else [f"p50_{key}", f"p99_{key}"]
        points = {p: series(album, p, keys) for p in album.results.policies}
        points = {p: rows for p, rows in points.items() if rows}
        if not points:
            continue
        count = sum(r["num_prompts"] for r in album.results.runs)
        title = f"{measure} over {axis}"
        says = sentences.at_the_end(points, axis, TEXTS[label], scale)
        columns = ["policy", sweep["over"], *keys]
        with album.draw(f"sweep-{name}", title, columns, says, count=count) as ((axes,), rows):
            for policy, line in points.items():
                look = album.look(policy)
                for i, part in enumerate(keys):
                    style = {**look, "linestyle": "-" if i == 0 else "--"}
                    label_of_line = f"{policy} {part[:3]}" if len(keys) > 1 else policy
                    values = [scale * row[1 + i] for row in line]
                    axes.plot(
                        [place(sweep, row[0]) for row in line], values, label=label_of_line, markersize=4, **style
                    )
                rows += [[policy, *row] for row in line]
                limit = sweep.get("saturation", {}).get(policy)
                if limit is not None:
                    axes.axvline(limit, color=look["color"], linewidth=0.8, linestyle=":")
            if sweep["over"] == "speculate":
                places = {value: i for i, value in enumerate(sweep["values"])}
                axes.set_xticks(list(places.values()), ["auto" if value == AUTO else f"{value:g}" for value in places])
            elif sweep["over"] != "variance":
                axes.set_xscale("log", base=2)
            if len(keys) > 1:
                axes.set_yscale("log")
            finish(axes, axis + ("; dotted: saturated" if sweep.get("saturation") else ""), label, zero=len(keys) == 1)


def place(sweep: dict[str, Any], value: float) -> float:
    """Return where a value is on the axis; numbers of draft tokens are as far apart as `auto` is from them."""
    return float(sweep["values"].index(value)) if sweep["over"] == "speculate" else value


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
    columns = ["policy", sweep["over"], *keys]
    says = sentences.reached(points)
    with album.draw("throughput-latency", "Latency over throughput", columns, says, count=count) as ((axes,), rows):
        for policy, line in points.items():
            look = album.look(policy)
            for i, style in ((2, "-"), (3, "--")):
                axes.plot(
                    [row[1] for row in line], [row[i] / 1000 for row in line], markersize=4,
                    label=f"{policy} {'p50' if i == 2 else 'p99'}", **{**look, "linestyle": style},
                )  # fmt: skip
            rows += [[policy, *row] for row in line]
            limit = sweep.get("saturation", {}).get(policy)
            for row in line:
                if row[0] == limit:
                    axes.annotate("saturated", (row[1], row[2] / 1000), fontsize=7)
        axes.set_yscale("log")
        finish(axes, "output tokens/s", "latency (s)", zero=False)
