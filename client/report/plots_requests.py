"""Pictures with a point for each request: first tokens over prompt lengths, simulated against measured."""

from __future__ import annotations

from typing import Any

from .album import Album, finish
from .store import slug


def ttft_over_prompt(album: Album) -> None:
    """Time to first token against the length of the prompt; only where answers streamed and lengths are told."""
    for load in album.results.loads:
        points = {
            policy: album.results.pairs(policy, load, "prompt_tokens", "ttft_s") for policy in album.results.policies
        }
        points = {policy: pairs for policy, pairs in points.items() if pairs}
        if not points:
            continue
        count = sum(map(len, points.values()))
        title = f"Time to first token over the prompt's length, {load}"
        with album.draw(f"ttft-over-prompt.{slug(load)}", title, count) as ((axes,), rows):
            rows.append(["policy", "prompt_tokens", "ttft_s"])
            for policy, pairs in points.items():
                axes.scatter(*zip(*pairs), s=14, alpha=0.6, label=policy, **dots(album, policy))
                rows += [[policy, *pair] for pair in pairs]
            finish(axes, "tokens of the prompt", "TTFT (s)")


def simulated_over_measured(album: Album) -> None:
    """What the simulator says of each request against what was measured; on the line they are equal."""
    told = album.results.simulated
    for load in album.results.loads:
        lines = [line for line in told if line["load"] == load]
        if not lines:
            continue
        kinds = [k for k in ("latency_s", "ttft_s") if any(line[k] for line in lines)]
        title = f"Simulated against measured, {load}"
        name = f"simulated-measured.{slug(load)}"
        with album.draw(name, title, len(lines), len(kinds)) as (grid, rows):
            rows.append(["measure", "policy", "measured_s", "simulated_s"])
            for axes, kind in zip(grid, kinds):
                for policy in album.results.policies:
                    pairs = pairs_of(lines, policy, kind)
                    if pairs:
                        label = f"{policy}: {error(pairs):+.1%}" if kind == "latency_s" else policy
                        axes.scatter(*zip(*pairs), s=14, alpha=0.6, label=label, **dots(album, policy))
                    rows += [[kind, policy, *pair] for pair in pairs]
                axes.axline((0.1, 0.1), (1, 1), color="#999999", linewidth=0.8)
                axes.set_xscale("log")
                axes.set_yscale("log")
                what = "TTFT" if kind == "ttft_s" else "latency"
                finish(axes, f"{what} measured (s)", "simulated (s)" if axes is grid[0] else "", zero=False)


def dots(album: Album, policy: str) -> dict[str, Any]:
    """Give colour and marker of a policy, as a scatter takes them."""
    look = album.look(policy)
    return {"color": look["color"], "marker": look["marker"]}


def pairs_of(lines: list[dict[str, str]], policy: str, kind: str) -> list[tuple[float, float]]:
    """Give measured and simulated seconds of each request of a policy that has both, none of them 0."""
    found = [(line[kind], line[f"simulated_{kind}"]) for line in lines if line["policy"] == policy]
    pairs = [(float(a), float(b)) for a, b in found if a and b]
    return [pair for pair in pairs if min(pair) > 0]


def error(pairs: list[tuple[float, float]]) -> float:
    """Give the relative error of the simulated mean."""
    measured, simulated = (sum(values) for values in zip(*pairs))
    return simulated / measured - 1


ALL = (ttft_over_prompt, simulated_over_measured)
