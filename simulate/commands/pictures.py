"""Pictures of the commands' results, if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from terminal.console import say
from terminal.options import UsageError

FORMATS = (".png", ".svg", ".pdf")
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)  # of ratios


def check(path: Path) -> None:
    """Raise UsageError for a file that no picture can be written to."""
    if path.suffix not in FORMATS:
        raise UsageError(f"--out is {str(path)!r}, but must end in {', '.join(FORMATS)}. Use plan.png")


def draw(picture: Callable[[Any, Any], None], results: Any, path: Path, console: Console, height: float = 4.5) -> None:
    """Draw into a file; without matplotlib print a note, because the figures are printed anyway."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say(console, "no picture: matplotlib is not installed. Run: pip install matplotlib")
        return
    figure = Figure(figsize=(8, height), layout="constrained")
    picture(figure, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    say(console, f"written: {path}")


def capacities(figure: Any, found: list[dict[str, Any]]) -> None:
    """Draw the rate that each policy holds over its batch size."""
    axes = figure.subplots()
    for policy in dict.fromkeys(row["policy"] for row in found):
        rows = [row for row in found if row["policy"] == policy]
        slots = [r["slots"] for r in rows]
        axes.plot(slots, [r["rate"] for r in rows], marker="o", label=policy)
        axes.fill_between(slots, *zip(*(r["interval"] for r in rows)), alpha=0.2)
    axes.set(xlabel="slots", ylabel="requests per second that meet all limits", xscale="log")
    sizes = sorted({row["slots"] for row in found})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend()


def replicas(figure: Any, drawn: tuple[dict[str, Any], Any]) -> None:
    """Draw the replicas that were paid for over time, one line for each run, above the rate of the arrivals."""
    runs, arrivals = drawn
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    for name, run in runs.items():
        times = [at - run.began for at, *_ in run.history] + [run.ended - run.began]
        counts = [sum(counts) for _, *counts in run.history]
        upper.stairs(counts, times, baseline=None, label=name, linewidth=1.5)
    upper.set(ylabel="replicas, starting ones too")
    upper.set_ylim(bottom=0)
    upper.legend()
    width = max(float(arrivals[-1]) / 100, 1e-9)
    rates, edges = np.histogram(arrivals, bins=100, range=(0, 100 * width))
    lower.stairs(rates / width, edges, fill=True, alpha=0.5)
    lower.set(xlabel="seconds", ylabel="requests/s")


def arena(heads: dict[str, str], reference: str, figure: Any, standings: list[Any]) -> None:
    """Draw a panel for each figure, with a row for each policy and its interval, the best on top."""
    rows = range(len(standings), 0, -1)
    panels = figure.subplots(1, len(heads), sharey=True)
    for axes, (field, head) in zip(panels, heads.items()):
        means = [standing.beside[field].mean for standing in standings]
        halves = [standing.beside[field].half or 0.0 for standing in standings]
        axes.errorbar(means, rows, xerr=halves, fmt="o", markersize=3, linewidth=1)
        if field == "misses":
            axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+g}")
            axes.set_xlabel("points", fontsize=8)
        else:
            axes.set_xticks(np.log(TICKS), [f"{tick:g}" for tick in TICKS])
            axes.set_xlim(min([*means, -0.5]) - 0.2, max([*means, 0.5]) + 0.2)
            axes.set_xlabel("times", fontsize=8)
        axes.axvline(0, color="#999999", linewidth=0.8)
        axes.set_title(head, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
    panels[0].set_yticks(list(rows), [standing.policy for standing in standings], fontsize=7)
    figure.supxlabel(f"beside {reference}, with 95 % intervals: further left is better", fontsize=8)


PREFIX = (
    ("hits", "hit_tokens", "Prompt tokens found in the cache", "tokens"),
    ("ttft", "p99_ttft_s", "Time to first token, p99", "TTFT (s)"),
    ("tpot", "p99_tpot_ms", "Time per token after the first, p99", "TPOT (ms)"),
)
BY_BATCH = (
    ("throughput", "requests_per_s", "Requests per second", "requests/s"),
    ("ttft", "p99_ttft_s", "Time to first token, p99", "TTFT (s)"),
    ("latency", "p99_latency_per_token_ms", "Latency by output tokens, p99", "ms per token"),
)
Table = list[dict[str, Any]]


def prefix(results: dict[str, Any], folder: Path, console: Console) -> None:
    """Draw hits, TTFT and TPOT over cache size, and what the batch size does."""
    try:
        from client.report import album
    except ImportError:
        say(console, "no pictures: matplotlib is not installed. Run: pip install matplotlib")
        return
    shares = {key.partition("_")[2]: rows for key, rows in results.items() if key[:6] == "share_"}
    caption = f"{results['cost']} · 50 prompts at once, after {results['train']:,} others · simulated"
    most = max(row["batch"] for rows in shares.values() for row in rows)
    kept = {share: [r for r in rows if r["batch"] == most] for share, rows in shares.items()}
    first = next(iter(shares.values()))[0]["kind"]
    alone = {share: [r for r in rows if r["kind"] == first] for share, rows in shares.items()}
    for name, key, title, y in PREFIX:
        title = f"{title}, batch of {most}"
        with album.drawn(folder, f"prefix-{name}", title, caption, len(shares)) as drawing:
            _panels(drawing, kept, ("kind", "cache", key), "tokens that the cache holds", y)
    for name, key, title, y in BY_BATCH:
        title = f"{title}, by tokens that the {first} holds"
        with album.drawn(folder, f"prefix-batch-{name}", title, caption, len(shares)) as drawing:
            _panels(drawing, alone, ("cache", "batch", key), "batch size", y)
    say(console, f"written: {folder}")


def _panels(
    drawing: tuple[list[Any], list[list[Any]]], shares: dict[str, Table], keys: tuple[str, str, str], x: str, y: str
) -> None:
    """Draw a panel for each share; `keys` name the value that distinguishes the lines, x and y."""
    from client.report import album

    (panels, table), (line, place, height) = drawing, keys
    table.append(["shared", *keys])
    for axes, (share, rows) in zip(panels, shares.items()):
        for i, value in enumerate(dict.fromkeys(row[line] for row in rows)):
            points = [(row[place], row[height]) for row in rows if row[line] == value]
            axes.plot(*zip(*points), label=str(value), markersize=4, **album.another(i))
            table += [[share, value, *point] for point in points]
        if share:
            axes.set_title(f"prompts share {share} tokens", fontsize=9)
        if place == "cache":
            axes.set_xscale("symlog", linthresh=100)
            axes.set_xlim(left=0)
    for axes in panels:  # when all are drawn: they share their y
        album.finish(axes, x, y if axes is panels[0] else "")
