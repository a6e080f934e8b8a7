"""Plots about single requests and programs: first tokens over prompt lengths, simulated over measured times, who made whom wait."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from .album import Album, finish

Pairs = list[tuple[float, float]]


def ttft_over_prompt(album: Album, load: str) -> None:
    """Draw time to first token over the length of the prompt; only if both are known and the prompts differ."""
    points = {p: album.results.pairs(p, load, "prompt_tokens", "ttft_s") for p in album.results.policies}
    points = {policy: pairs for policy, pairs in points.items() if pairs}
    if len({length for pairs in points.values() for length, _ in pairs}) < 2:
        return
    title = "Time to first token over the prompt's length"
    count, columns = sum(map(len, points.values())), ["policy", "prompt_tokens", "ttft_s"]
    with album.draw("ttft-over-prompt", title, columns, load=load, count=count) as ((axes,), rows):
        for policy, pairs in points.items():
            scatter(axes, album, policy, pairs, policy)
            rows += [[policy, *pair] for pair in pairs]
        finish(axes, "tokens of the prompt", "TTFT (s)")


def simulated_over_measured(album: Album, load: str) -> None:
    """Draw each request's simulated time over its measured time; on the line they are equal."""
    lines = [line for line in album.results.simulated if line["load"] == load]
    if not lines:
        return
    kinds = [k for k in ("latency_s", "ttft_s") if any(line[k] for line in lines)]
    title, columns = "Simulated over measured", ["measure", "policy", "measured_s", "simulated_s"]
    says = "On the line both are equal. The legend shows the mean's error; bars are 90 % intervals."
    count, across = len(lines), len(kinds)
    with album.draw("simulated-measured", title, columns, says, load=load, count=count, across=across) as (grid, rows):
        for axes, kind in zip(grid, kinds):
            for policy in album.results.policies:
                if pairs := pairs_of(lines, policy, kind):
                    label = f"{policy}: {error(pairs):+.1%}" if kind == "latency_s" else policy
                    scatter(axes, album, policy, pairs, label)
                    rows += [[kind, policy, *pair] for pair in pairs]
            for policy, _, bar in album.results.intervals(load) if kind == "latency_s" else ():
                measured, simulated, low, high = bar
                sides = [[simulated - low], [high - simulated]]
                axes.errorbar([measured], [simulated], sides, color=album.look(policy)["color"], capsize=4, fmt="_")
            axes.axline((0.1, 0.1), (1, 1), color="#999999", linewidth=0.8)
            axes.set_xscale("log")
            axes.set_yscale("log")
            measure = "TTFT" if kind == "ttft_s" else "latency"
            finish(axes, f"{measure} measured (s)", "simulated (s)" if axes is grid[0] else "", zero=False)


def program_times(album: Album, load: str) -> None:
    """Draw the share of programs that were done within a time; only where some were."""
    each = {p: album.results.arrays(p, load, "program_times") for p in album.results.policies}
    took = {p: sorted(one["took_s"] for one in some if one["took_s"] is not None) for p, some in each.items()}
    if not any(took.values()):
        return
    title, columns = "Share of programs done within a time", ["policy", "program_s", "share"]
    count = sum(map(len, took.values()))
    with album.draw("program-times", title, columns, load=load, count=count, unit="programs") as ((axes,), rows):
        for policy, times in took.items():
            shares = [(i + 1) / len(times) for i in range(len(times))]
            axes.step(times, [100 * share for share in shares], where="post", label=policy, **album.line(policy))
            rows += [[policy, *pair] for pair in zip(times, shares)]
        axes.set_xscale("log")
        finish(axes, "from the first call to the last answer, with tools (s)", "programs (%)")


def blame(album: Album, load: str) -> None:
    """Draw how much each client delayed each other client's requests, as a matrix for each policy."""
    known = {policy: found for policy in album.results.policies if (found := album.results.blame(policy, load))}
    if not known:
        return
    title, columns = "Who made whom wait, simulated", ["policy", "client", "because_of", "wait_ms", "run_ms"]
    says = "How much longer a request of the row's client waited and ran because of the column's, on average."
    with album.draw("blame", title, columns, says, load=load, across=len(known)) as (grid, rows):
        for axes, (policy, figures) in zip(grid, known.items()):
            clients = figures["clients"]
            wait, run = ([[*row, rest] for row, rest in zip(part["by"], part["residual"])]
                         for part in (figures["wait_ms"], figures["run_ms"]))  # fmt: skip
            both = np.array(wait) + np.array(run)
            most = np.abs(both).max() or 1.0
            axes.imshow(both, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
            for (k, j), value in np.ndenumerate(both):
                color = "white" if abs(value) > 0.6 * most else "black"
                axes.text(j, k, f"{value:,.0f}", ha="center", va="center", fontsize=8, color=color)
                rows.append([policy, clients[k], [*clients, "residual"][j], wait[k][j], run[k][j]])
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


def error(pairs: Pairs) -> float:
    """Return the relative error of the simulated mean."""
    return sum(simulated for _, simulated in pairs) / sum(measured for measured, _ in pairs) - 1
