"""The race in the page of a comparison: the live page's race, with the recorded steps of this comparison.

The race's page, style and scripts come from `web/`, so that a report shows what the server would. The steps are
compressed and embedded, and no network is needed.
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
MAX_STEPS = 4000  # of a run; beyond that all runs of a load are cut at the same time
SCRIPT = re.compile(r'\s*<script src="web/([a-z.]+)"[^>]*></script>')
Runs = dict[str, list[dict[str, Any]]]  # the steps of each policy


def embed(results: store.Results) -> str:
    """Return the race as HTML; empty unless at least two policies have steps under the same load."""
    races = {}
    for load in results.loads:
        steps_of = {policy: _steps(results, policy, load) for policy in results.policies}
        runs = {policy: steps for policy, steps in steps_of.items() if steps}
        if len(runs) > 1:
            races[load] = runs
    return section(races) if races and (WEB / "race.html").is_file() else ""


def _steps(results: store.Results, policy: str, load: str) -> list[dict[str, Any]]:
    steps = [step for step in results.iterations(policy, load) if "slot_steps" in step]
    sent = {r["id"] for r in results.requests if (r["policy"], r["load"]) == (policy, load)}
    measured = [step for step in steps if any(m["id"] in sent for m in step["members"])]
    return measured or steps  # without the warm-up, if request ids tell it apart


def section(races: dict[str, Runs]) -> str:
    """Return a frame with the races, one per load."""
    recorded = []
    for load, runs in races.items():
        shortened, seconds = cut(runs)
        recorded.append({"load": load, "cut": seconds, "runs": shortened})
    loads = html.escape(", ".join(races))
    return (
        f"<p>The slots of each policy, step by step, in its first run under {loads}.</p>"
        f'<iframe class="race" title="Race under {loads}" srcdoc="{html.escape(document(recorded))}"></iframe>'
    )


def cut(runs: Runs, limit: int = MAX_STEPS) -> tuple[Runs, float | None]:
    """Cut all runs at the time when the first of them reaches the limit; return them and that time, None if uncut."""
    ends = [steps[limit]["t"] - steps[0]["t"] for steps in runs.values() if len(steps) > limit]
    if not ends:
        return runs, None
    end = min(ends)
    shortened = {policy: [step for step in steps if step["t"] - steps[0]["t"] < end] for policy, steps in runs.items()}
    return shortened, end


def document(recorded: list[dict[str, Any]]) -> str:
    """Return the race's page with its style, scripts and recorded steps embedded."""
    page = (WEB / "race.html").read_text("utf-8")
    scripts = [(WEB / name).read_text("utf-8") for name in SCRIPT.findall(page)]
    packed = gzip.compress(json.dumps(recorded, separators=(",", ":")).encode(), mtime=0)
    inside = f'<script type="application/gzip" id="recorded">{base64.b64encode(packed).decode()}</script>'
    inside += "".join(f"<script>{script}</script>" for script in scripts)
    style = (WEB / "style.css").read_text("utf-8")
    page = SCRIPT.sub("", page)
    page = re.sub(r'<link rel="icon"[^>]*>\s*', "", page)
    page = page.replace('<img src="web/icon.svg" alt="" width="22" height="22">', "")
    page = page.replace('<link rel="stylesheet" href="web/style.css">', f"<style>{style}</style>")
    page = page.replace("<html ", '<html class="embedded" ', 1)
    return page.replace("</body>", inside + "</body>")
