"""Plots of the server's own steps, from iterations.jsonl: slots, batch size, queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .album import Album, finish
from .store import slug

SHADES = {"prefill": 1.0, "decode": 0.62, "held": 0.25}
MAX_STEPS = 600
COLORS = 10


def over_time(album: Album, load: str) -> None:
    """Draw batch size and queue length over time."""
    by_policy = {p: album.results.iterations(p, load) for p in album.results.policies}
    by_policy = {p: steps for p, steps in by_policy.items() if steps}
    if not by_policy:
        return
    count = sum(map(len, by_policy.values()))
    drawn: dict[str, tuple[str, Callable[[Any], int]]] = {
        "batch-over-time": ("requests in the batch", lambda s: sum(m["phase"] != "idle" for m in s["members"])),
        "queue-over-time": ("requests waiting", lambda step: step["queue"]),
    }
    for name, (label, read) in drawn.items():
        title = f"{label.capitalize()} over time"
        series = {policy: [read(step) for step in steps] for policy, steps in by_policy.items()}
        with album.draw(name, title, load=load, count=count, unit="steps") as (axes,):
            for policy, values in series.items():
                times = [step["t"] - by_policy[policy][0]["t"] for step in by_policy[policy]]
                axes.step(times, values, where="post", label=policy, linewidth=1, **album.line(policy))
            finish(axes, "time since the first step (s)", label)


def slots(album: Album, load: str) -> None:
    """Draw the Gantt chart of each policy: rows are slots, columns steps, colors requests, pale if a slot is held."""
    numbers = {r["id"]: int(r["index"]) for r in album.results.requests if r["load"] == load and r.get("id")}
    for policy in album.results.policies:
        steps = busiest(album.results.iterations(policy, load))
        if not steps:
            continue
        name, title, count = f"slots.{slug(policy)}", f"Slots of {policy}", len(steps)
        says = "Pale slots are held for requests that have finished."
        with album.draw(name, title, says, load=load, count=count, unit="steps") as (axes,):
            image = picture(steps, numbers)
            extent = (steps[0]["n"] - 0.5, steps[-1]["n"] + 0.5, len(image) - 0.5, -0.5)
            axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
            axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.set_xlabel("step; a color is the same request under every policy")
            axes.set_ylabel("slot")
            axes.legend(
                handles=[Patch(color="#808080", alpha=shade, label=kind) for kind, shade in SHADES.items()],
                fontsize=8, loc="upper right", bbox_to_anchor=(1, 1.1), ncols=len(SHADES), frameon=False,
            )  # fmt: skip


def busiest(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the stretch of at most MAX_STEPS steps in which the most slots were taken."""
    if len(steps) <= MAX_STEPS:
        return steps
    taken = np.cumsum([0, *(len(step["members"]) for step in steps)])
    start = int(np.argmax(taken[MAX_STEPS:] - taken[:-MAX_STEPS]))
    return steps[start : start + MAX_STEPS]


def picture(steps: list[dict[str, Any]], known: Mapping[str, int]) -> np.ndarray:
    """Color each slot of each step by its request, opaque by its phase.

    Requests of `known` have these numbers, and all others the next ones.
    """
    height = 1 + max((m["slot"] for s in steps for m in s["members"]), default=0)
    image = np.zeros((height, len(steps), 4))
    numbers = dict(known)
    palette = np.array([colormaps["tab10"](i)[:3] for i in range(COLORS)])
    for x, step in enumerate(steps):
        for member in step["members"]:
            shade = SHADES.get(member["phase"])
            if shade is None or member["slot"] < 0:
                continue
            number = numbers.setdefault(member["id"], len(numbers))
            image[member["slot"], x] = *palette[number % COLORS], shade
    return image
