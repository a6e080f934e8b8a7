"""Plots of a sweep: throughput and latency over the value that grows, with 95 % bands where runs were repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from . import figures, summary
from .album import BOTTOM, Album, finish

AXES = {"rate": "offered requests/s", "users": "users (closed loop)"}
HEADS = ["policy", "value", "figure", "mean", "low", "high", "runs"]


class Curves(NamedTuple):
    """A figure over the swept value: its keys in a run, title, label of the axis, and the factor to that unit."""

    name: str
    keys: Sequence[str]
    title: str
    label: str
    scale: float


def times(name: str, title: str, label: str, scale: float) -> Curves:
    """Return the curves of a measured time: p50, and p99 dashed."""
    return Curves(name, (f"p50_{name}_ms", f"p99_{name}_ms"), title, label, scale)


FIGURES = [
    times("ttft", "Time to first token", "TTFT (s)", 0.001),
    times("itl", "Time between two tokens", "ITL (ms)", 1.0),
    times("e2el", "Latency", "latency (s)", 0.001),
    times("tpot", "Time per token after the first", "TPOT (ms)", 1.0),
    Curves("throughput", ["output_throughput"], "Throughput", "output tokens/s", 1.0),
    Curves("goodput", ["request_goodput"], "Goodput", "requests/s within limits", 1.0),
    Curves("hits", ["hit_tokens"], "Prompt tokens from the cache", "prompt tokens (%)", 100.0),
    Curves("tokens-per-step", ["tokens_per_step"], "Tokens of a request in a step", "tokens per step", 1.0),
    Curves("acceptance", ["acceptance"], "Accepted draft tokens", "accepted (%)", 100.0),
]
PANELS = 6  # of the overview: the first figures


class Point(NamedTuple):
    """The mean of a figure over the runs with a value, and its 95 % interval if there are enough of them."""

    value: float
    mean: float
    span: tuple[float, float] | None
    runs: int


def series(album: Album, policy: str, key: str) -> list[Point]:
    """Return the points of a policy, sorted; values of which a run lacks the figure are left out."""
    runs = [run for run in album.results.runs if run["policy"] == policy and run.get("value") is not None]
    groups = {value: [run for run in runs if run["value"] == value] for value in sorted({run["value"] for run in runs})}
    found = [(value, summary.average(some, key), some) for value, some in groups.items()]
    return [
        Point(float(value), mean, figures.student([run[key] for run in some]), len(some))
        for value, mean, some in found
        if mean is not None
    ]


def known(album: Album) -> list[Curves]:
    """Return the figures that the runs of a sweep have."""
    return [each for each in FIGURES if any(series(album, p, each.keys[0]) for p in album.results.policies)]


def draw(axes: Axes, album: Album, curves: Curves) -> None:
    """Draw a figure of all policies over the swept values; saturation is marked."""
    sweep = album.results.summary["sweep"]
    for policy in album.results.policies:
        look = album.look(policy)
        for key, style in zip(curves.keys, ("-", "--")):
            points = series(album, policy, key)
            label = f"{policy} {key[:3]}" if len(curves.keys) > 1 else policy
            line = [curves.scale * point.mean for point in points]
            axes.plot([p.value for p in points], line, label=label, markersize=4, **look | {"linestyle": style})
            low, high = ([curves.scale * p.span[i] for p in points if p.span] for i in (0, 1))
            axes.fill_between(
                [p.value for p in points if p.span], low, high, color=look["color"], alpha=0.15, linewidth=0
            )
        if (limit := sweep.get("saturation", {}).get(policy)) is not None:
            axes.axvline(limit, color=look["color"], linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    if len(curves.keys) > 1:
        axes.set_yscale("log")
    axis = AXES[sweep["over"]] + ("; dotted: saturated" if sweep.get("saturation") else "")
    finish(axes, axis, curves.label, zero=len(curves.keys) == 1)


def panels(album: Album, grid: Sequence[Axes]) -> None:
    """Draw the first figures side by side, each on axes of its own."""
    shown = known(album)[:PANELS]
    for axes, curves in zip(grid, shown):
        draw(axes, album, curves)
        axes.set_title(curves.title, fontsize=9)
        axes.set_xlabel(AXES[album.results.summary["sweep"]["over"]])
        if legend := axes.get_legend():
            legend.remove()
    lines, names = grid[0].get_legend_handles_labels()
    grid[0].figure.legend(
        lines,
        names,
        fontsize=8,
        loc="lower center",
        bbox_to_anchor=(0.5, BOTTOM / 2),
        ncols=6,
        handlelength=3,
        frameon=False,
    )
    for axes in grid[len(shown) :]:
        axes.set_axis_off()


def table(album: Album) -> list[list[object]]:
    """Return the points of all figures as lines of a CSV, in the units that the keys name."""
    return [
        [policy, point.value, key, point.mean, *(point.span or ("", "")), point.runs]
        for curves in known(album)
        for key in curves.keys
        for policy in album.results.policies
        for point in series(album, policy, key)
    ]


def overview(album: Album) -> None:
    """Draw the usual figures in one picture, and write the points of all."""
    if album.results.runs:
        count = sum(r["num_prompts"] for r in album.results.runs)
        over = AXES[album.results.summary["sweep"]["over"]]
        with album.draw(
            "sweep",
            f"p50 and p99 over {over}; bands: 95 % over repeats; dotted: saturated",
            count=count,
            across=3,
            down=2,
            points=[HEADS, *table(album)],
        ) as grid:
            panels(album, grid)


def curves(album: Album) -> None:
    """Draw each figure by itself."""
    count = sum(r["num_prompts"] for r in album.results.runs)
    for each in known(album):
        title = f"{each.title} over {AXES[album.results.summary['sweep']['over']]}"
        with album.draw(f"sweep-{each.name}", title, count=count) as (axes,):
            draw(axes, album, each)


def throughput_latency(album: Album) -> None:
    """Draw latency over throughput, the field's usual plot."""
    keys = ("output_throughput", "p50_e2el_ms", "p99_e2el_ms")
    lines = {p: [*zip(*(series(album, p, key) for key in keys))] for p in album.results.policies}
    if not any(lines.values()):
        return
    count = sum(run["num_prompts"] for run in album.results.runs)
    with album.draw("throughput-latency", "Latency over throughput", count=count) as (axes,):
        for policy, line in lines.items():
            look = album.look(policy)
            for i, style in ((1, "-"), (2, "--")):
                axes.plot(
                    [points[0].mean for points in line], [points[i].mean / 1000 for points in line], markersize=4,
                    label=f"{policy} {keys[i][:3]}", **{**look, "linestyle": style},
                )  # fmt: skip
            limit = album.results.summary["sweep"].get("saturation", {}).get(policy)
            for rate, median, _ in line:
                if rate.value == limit:
                    axes.annotate("saturated", (rate.mean, median.mean / 1000), fontsize=7)
        axes.set_yscale("log")
        finish(axes, "output tokens/s", "latency (s)", zero=False)
