"""Pictures of the server's own steps, from iterations.jsonl: slots, batch size, queue."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .album import Album, finish
from .store import slug

SHADES = {"prefill": 1.0, "decode": 0.62, "held": 0.25}
MOST_STEPS = 600
COLOURS = 10


def over_time(album: Album) -> None:
    """Batch size and queue length over time, one above the other by policy."""
    for load in album.results.loads:
        told = {p: album.results.iterations(p, load) for p in album.results.policies}
        told = {p: steps for p, steps in told.items() if steps}
        if not told:
            continue
        count = sum(map(len, told.values()))
        for name, label, read in (
            ("batch-over-time", "requests in the batch", batch),
            ("queue-over-time", "requests waiting", lambda step: step["queue"]),
        ):
            title = f"{label.capitalize()} over time, {load}"
            with album.draw(f"{name}.{slug(load)}", title, count, unit="steps") as ((axes,), rows):
                rows.append(["policy", "seconds", name.partition("-")[0]])
                for policy, steps in told.items():
                    began = steps[0]["t"]
                    times = [step["t"] - began for step in steps]
                    values = [read(step) for step in steps]
                    look = {**album.look(policy), "marker": None}
                    axes.step(times, values, where="post", label=policy, linewidth=1, **look)
                    rows += [[policy, t, v] for t, v in zip(times, values)]
                finish(axes, "time since the first step (s)", label)


def batch(step: dict[str, Any]) -> int:
    """Count the rows that were computed, held ones too."""
    return sum(1 for member in step["members"] if member["phase"] != "idle")


def slots(album: Album) -> None:
    """The Gantt picture: rows are slots, columns steps, colours requests, pale where a slot is held."""
    for load in album.results.loads:
        for policy in album.results.policies:
            steps = busiest(album.results.iterations(policy, load))
            if not steps:
                continue
            title = f"Slots of {policy}, {load}"
            name = f"slots.{slug(policy)}.{slug(load)}"
            with album.draw(name, title, len(steps), unit="steps") as ((axes,), rows):
                rows.append(["step", "slot", "request", "phase"])
                image = picture(steps, rows)
                first, last = steps[0]["n"], steps[-1]["n"]
                axes.imshow(
                    image, aspect="auto", interpolation="nearest",
                    extent=(first - 0.5, last + 0.5, len(image) - 0.5, -0.5),
                )  # fmt: skip
                axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
                axes.set_xlabel("step; a colour a request")
                axes.set_ylabel("slot")
                axes.legend(
                    handles=[Patch(color=str(1 - 0.8 * s), label=k) for k, s in SHADES.items()],
                    fontsize=7, loc="upper left", bbox_to_anchor=(1, 1),
                )  # fmt: skip


def busiest(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the stretch of steps in which the most slots were taken."""
    if len(steps) <= MOST_STEPS:
        return steps
    taken = np.cumsum([0, *(len(step["members"]) for step in steps)])
    start = int(np.argmax(taken[MOST_STEPS:] - taken[:-MOST_STEPS]))
    return steps[start : start + MOST_STEPS]


def picture(steps: list[dict[str, Any]], rows: list[list[Any]]) -> np.ndarray:
    """Colour each slot of each step by its request and phase; note them in `rows`."""
    high = 1 + max((m["slot"] for s in steps for m in s["members"]), default=0)
    image = np.ones((high, len(steps), 3))
    known: dict[str, int] = {}
    palette = _palette()
    for x, step in enumerate(steps):
        for member in step["members"]:
            shade = SHADES.get(member["phase"])
            if shade is None or member["slot"] < 0:
                continue
            colour = palette[known.setdefault(member["id"], len(known)) % COLOURS]
            image[member["slot"], x] = 1 - shade * (1 - colour)
            rows.append([step["n"], member["slot"], known[member["id"]], member["phase"]])
    return image


def _palette() -> np.ndarray:
    from matplotlib import colormaps

    return np.array([colormaps["tab10"](i)[:3] for i in range(COLOURS)])


ALL = (slots, over_time)
