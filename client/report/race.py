"""The race of a comparison within its page: the live page's own race, with the recorded steps of this comparison in it.

The page of the race, its style and its scripts come from `web/`, so that a report shows what the server would. What it
holds is packed, and it asks no network.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from pathlib import Path
from typing import Any

from . import store

WEB = Path(__file__).resolve().parents[2] / "web"
MOST_STEPS = 4000  # of a run; all runs of a load are cut at the same moment then
SCRIPT = re.compile(r'\s*<script src="web/([a-z.]+)"[^>]*></script>')
Runs = dict[str, list[dict[str, Any]]]  # the steps of each policy


def embed(results: store.Results) -> str:
    """Return the race as HTML; nothing where fewer than two policies told of their steps under one load."""
    races = {}
    for load in results.loads:
        told = {policy: _steps(results, policy, load) for policy in results.policies}
        runs = {policy: steps for policy, steps in told.items() if steps}
        if len(runs) > 1:
            races[load] = runs
    return section(races) if races and (WEB / "race.html").is_file() else ""


def _steps(results: store.Results, policy: str, load: str) -> list[dict[str, Any]]:
    steps = [step for step in results.iterations(policy, load) if "slot_steps" in step]
    sent = {r["id"] for r in results.requests if (r["policy"], r["load"]) == (policy, load)}
    measured = [step for step in steps if any(m["id"] in sent for m in step["members"])]
    return measured or steps  # without what warmed the server up, where it can be told apart


def section(races: dict[str, Runs]) -> str:
    """Return the heading, and the races, a load each, in a frame of its own."""
    told = []
    for load, runs in races.items():
        kept, seconds = cut(runs)
        told.append({"load": load, "cut": seconds, "runs": kept})
    under = html.escape(", ".join(races))
    return (
        f"<h2>Race</h2><p>The slots of each policy, step by step, in its first run under {under}.</p>"
        f'<iframe class="race" title="Race under {under}" srcdoc="{html.escape(document(told))}"></iframe>'
    )


def cut(runs: Runs, most: int = MOST_STEPS) -> tuple[Runs, float | None]:
    """Return as much of all runs as is whole in each, and the seconds after which that ends, None for no end."""
    ends = [steps[most]["t"] - steps[0]["t"] for steps in runs.values() if len(steps) > most]
    if not ends:
        return runs, None
    end = min(ends)
    kept = {policy: [step for step in steps if step["t"] - steps[0]["t"] < end] for policy, steps in runs.items()}
    return kept, end


def document(told: list[dict[str, Any]]) -> str:
    """Return the page of the race with its style, its scripts and what it shows in it."""
    page = (WEB / "race.html").read_text("utf-8")
    scripts = [(WEB / name).read_text("utf-8") for name in SCRIPT.findall(page)]
    packed = gzip.compress(json.dumps(told, separators=(",", ":")).encode(), mtime=0)
    inside = f'<script type="application/gzip" id="recorded">{base64.b64encode(packed).decode()}</script>'
    inside += "".join(f"<script>{script}</script>" for script in scripts)
    style = (WEB / "style.css").read_text("utf-8")
    page = SCRIPT.sub("", page)
    page = re.sub(r'<link rel="icon"[^>]*>\s*', "", page)
    page = page.replace('<img src="web/icon.svg" alt="" width="22" height="22">', "")
    page = page.replace('<link rel="stylesheet" href="web/style.css">', f"<style>{style}</style>")
    page = page.replace("<html ", '<html class="embedded" ', 1)
    return page.replace("</body>", inside + "</body>")
