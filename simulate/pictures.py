"""Pictures of what the commands found, where matplotlib is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from simulate.arguments import say


def draw(picture: Callable[[Any, Any], None], told: Any, path: Path, console: Console) -> None:
    """Draw into a file; without matplotlib say so, since the figures are told anyway."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say(console, "no picture: matplotlib is not installed. Run: pip install matplotlib")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    picture(figure, told)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    say(console, f"written: {path}")


def capacities(figure: Any, found: list[dict[str, Any]]) -> None:
    """Draw the rate that each policy holds over its batch size."""
    axes = figure.subplots()
    for policy in dict.fromkeys(row["policy"] for row in found):
        rows = [row for row in found if row["policy"] == policy]
        axes.plot([r["slots"] for r in rows], [r["rate"] for r in rows], marker="o", label=policy)
    axes.set(xlabel="slots", ylabel="requests a second that meet all limits", xscale="log")
    axes.set_ylim(bottom=0)
    axes.legend()


def prefix(figure: Any, told: dict[str, Any]) -> None:
    """Draw hits, TTFT and TPOT over cache and batch size; and the two caches on a trace, if there was one."""
    shares = [key for key in told if key.startswith("share_")]
    axes = figure.subplots(1, 3 + ("caches" in told))
    for key in shares:
        rows = told[key]
        batch = max(row["batch"] for row in rows)
        by_cache = [row for row in rows if row["batch"] == batch]
        size = max(row["cache"] for row in rows)
        by_batch = [row for row in rows if row["cache"] == size]
        label = f"{key.removeprefix('share_')} tokens shared"
        axes[0].plot(
            [r["cache"] for r in by_cache], [r["hit_tokens"] for r in by_cache], "o-", label=label
        )
        axes[1].plot(
            [r["cache"] for r in by_cache], [r["p99_ttft_s"] for r in by_cache], "o-", label=label
        )
        axes[2].plot(
            [r["batch"] for r in by_batch], [r["p99_tpot_ms"] for r in by_batch], "o-", label=label
        )
    for axis, x, y in zip(
        axes,
        ("edges kept", "edges kept", "batch size"),
        ("tokens hit", "p99 TTFT, s", "p99 TPOT, ms"),
    ):
        axis.set(xlabel=x, ylabel=y)
        axis.legend(fontsize="small")
    if "caches" in told:
        rows = told["caches"]
        for kind in ("trie", "lru"):
            axes[3].plot([r["size"] for r in rows], [r[kind] for r in rows], "o-", label=kind)
        axes[3].set(xlabel="blocks kept", ylabel="blocks hit", xscale="log")
        axes[3].legend(fontsize="small")
