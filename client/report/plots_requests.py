"""Plots about single requests and programs: shares done within a time, times over lengths, simulated times, who made whom wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from .album import Album, finish

Pairs = list[tuple[float, float]]
SHARES = np.linspace(0, 1, 201)
LEAST_SECONDS = 1e-4  # on a logarithmic axis


def latency_cdf(album: Album) -> None:
    """Draw the share of requests answered within a time, for each load side by side: Anyscale's plot."""
    loads = [load for load in album.results.loads if album.policies(load)]
    if len(loads) > 2:
        loads = [loads[0], loads[-1]]
    if not loads:
        return
    count = sum(map(album.requests, loads))
    title = "Share of requests answered within a time"
    with album.draw("latency-cdf", title, count=count, across=len(loads)) as grid:
        for axes, load in zip(grid, loads):
            times = {p: album.results.column(p, load, "latency_s") for p in album.policies(load)}
            shares(axes, album, times)
            axes.set_title(load, fontsize=9)
            finish(axes, "latency (s)", "requests (%)" if axes is grid[0] else "")


def distributions(album: Album, load: str) -> None:
    """Draw the share of first tokens, and of gaps between tokens, within a time; only for streamed answers."""
    policies = album.policies(load)
    firsts = {p: album.results.column(p, load, "ttft_s") for p in policies}
    gaps = {p: [gap for request in album.results.arrays(p, load, "itls") for gap in request] for p in policies}
    if not any(firsts.values()):
        return
    title = "Time to first token, and between tokens"
    count = sum(map(len, firsts.values()))
    with album.draw("ttft-itl", title, load=load, count=count, across=2) as grid:
        for axes, measure, times in zip(grid, ("TTFT", "ITL"), (firsts, gaps)):
            shares(axes, album, times)
            finish(axes, f"{measure} (s)", "share (%)" if axes is grid[0] else "")


def program_times(album: Album, load: str) -> None:
    """Draw the share of programs that were done within a time; only where some were."""
    each = {p: album.results.arrays(p, load, "program_times") for p in album.results.policies}
    times = {p: [one["took_s"] for one in some if one["took_s"] is not None] for p, some in each.items()}
    if not any(times.values()):
        return
    title = "Share of programs done within a time"
    count = sum(map(len, times.values()))
    with album.draw("program-times", title, load=load, count=count, unit="programs") as (axes,):
        shares(axes, album, times)
        finish(axes, "from the first call to the last answer, with tools (s)", "programs (%)")


def shares(axes: Axes, album: Album, times: Mapping[str, Sequence[float]]) -> None:
    """Draw the share of each policy's times up to each time."""
    for policy, values in times.items():
        if values:
            reached = np.maximum(np.quantile(values, SHARES, method="inverted_cdf"), LEAST_SECONDS)
            axes.step(reached, 100 * SHARES, where="post", label=policy, **album.line(policy))
    axes.set_xscale("log")


def ttft_over_prompt(album: Album, load: str) -> None:
    """Draw time to first token over the length of the prompt; only if both are known and the prompts differ."""
    points = {p: album.results.pairs(p, load, "prompt_tokens", "ttft_s") for p in album.results.policies}
    points = {policy: pairs for policy, pairs in points.items() if pairs}
    if len({length for pairs in points.values() for length, _ in pairs}) < 2:
        return
    title = "Time to first token over the prompt's length"
    count = sum(map(len, points.values()))
    with album.draw("ttft-over-prompt", title, load=load, count=count) as (axes,):
        for policy, pairs in points.items():
            scatter(axes, album, policy, pairs, policy)
        finish(axes, "tokens of the prompt", "TTFT (s)")


def simulated_over_measured(album: Album, load: str) -> None:
    """Draw each request's simulated time over its measured time; on the line they are equal."""
    lines = [line for line in album.results.simulated if line["load"] == load]
    if not lines:
        return
    kinds = [k for k in ("latency_s", "ttft_s") if any(line[k] for line in lines)]
    says = "On the line both are equal. The legend shows the mean's error; bars are 90 % intervals."
    count, across = len(lines), len(kinds)
    with album.draw(
        "simulated-measured", "Simulated over measured", says, load=load, count=count, across=across
    ) as grid:
        for axes, kind in zip(grid, kinds):
            for policy in album.results.policies:
                if pairs := pairs_of(lines, policy, kind):
                    sums = [sum(seconds) for seconds in zip(*pairs)]
                    label = f"{policy}: {sums[1] / sums[0] - 1:+.1%}" if kind == "latency_s" else policy
                    scatter(axes, album, policy, pairs, label)
            for policy, _, bar in album.results.intervals(load) if kind == "latency_s" else ():
                measured, simulated, low, high = bar
                sides = [[simulated - low], [high - simulated]]
                axes.errorbar([measured], [simulated], sides, color=album.look(policy)["color"], capsize=4, fmt="_")
            axes.axline((0.1, 0.1), (1, 1), color="#999999", linewidth=0.8)
            axes.set_xscale("log")
            axes.set_yscale("log")
            measure = "TTFT" if kind == "ttft_s" else "latency"
            finish(axes, f"{measure} measured (s)", "simulated (s)" if axes is grid[0] else "", zero=False)


def blame(album: Album, load: str) -> None:
    """Draw how much each client delayed each other client's requests, as a matrix for each policy."""
    known = {policy: found for policy in album.results.policies if (found := album.results.blame(policy, load))}
    if not known:
        return
    says = "How much longer a request of the row's client waited and ran because of the column's, on average."
    with album.draw("blame", "Who made whom wait, simulated", says, load=load, across=len(known)) as grid:
        for axes, (policy, figures) in zip(grid, known.items()):
            clients = figures["clients"]
            both = sum(
                np.column_stack([figures[part]["by"], figures[part]["residual"]]) for part in ("wait_ms", "run_ms")
            )
            most = np.abs(both).max() or 1.0
            axes.imshow(both, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
            for (k, j), value in np.ndenumerate(both):
                color = "white" if abs(value) > 0.6 * most else "black"
                axes.text(j, k, f"{value:,.0f}", ha="center", va="center", fontsize=8, color=color)
            axes.set_title(f"{policy}: ms per request", fontsize=9)
            axes.set_xticks(range(len(clients) + 1), [*clients, "residual"], fontsize=7, rotation=30, ha="right")
            axes.set_yticks(range(len(clients)), clients, fontsize=7)
            axes.set_xlabel("because of")


def scatter(axes: Axes, album: Album, policy: str, pairs: Pairs, label: str) -> None:
    x, y = zip(*pairs)
    look = album.look(policy)
    axes.scatter(x, y, s=14, alpha=0.6, label=label, color=look["color"], marker=look["marker"])


def pairs_of(lines: list[dict[str, str]], policy: str, kind: str) -> Pairs:
    """Return measured and simulated seconds of each request of a policy that has both, neither of them 0."""
    texts = [(line[kind], line[f"simulated_{kind}"]) for line in lines if line["policy"] == policy]
    pairs = [(float(a), float(b)) for a, b in texts if a and b]
    return [pair for pair in pairs if min(pair) > 0]
