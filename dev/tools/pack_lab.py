"""Pack the lab into a folder, all but Pyodide: `python dev/tools/pack_lab.py FOLDER` (`dev/tools/build_lab.sh` does both).

The packages travel as they are, in one archive, with the arrivals of the named workloads: the C library's `log`, `exp` and
`cos`, which draw them, differ in the last bit between systems. The same sources give the same archive.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import policies
import simulate.arena.lab  # noqa: F401  what it imports is what the page needs
from simulate.arena.lessons import LESSONS

LOADED = [Path(file) for module in sys.modules.values() if (file := getattr(module, "__file__", None))]
REQUESTS, SEEDS = 2000, 3
CLIENTS, PRIORITIES, SLO = 3, 3, (5.0, 20.0, 60.0)  # for the orders that go by them
# Each is drawn by the client's own code: a workload, an arrival process, and the rate that suits four slots.
WORKLOADS = {
    "steady": ("uniform", "poisson", 4.0, "answers of 2 to 129 tokens, at random times"),
    "bursty": ("uniform", "gamma", 4.0, "answers of 2 to 129 tokens, in bursts"),
    "all-at-once": ("uniform", "burst", 4.0, "answers of 2 to 129 tokens; all requests come at once, at any rate"),
    "short-and-long": ("short-long", "poisson", 5.0, "nine short chats to one long"),
    "bell": ("clipped-normal", "poisson", 2.5, "answers of about 100 tokens"),
    "orca": ("orca", "poisson", 3.5, "prompts of 32 to 512 tokens, answers of 1 to 128 (Orca, OSDI 2022)"),
    "long-prompts": ("fastgen", "poisson", 3.0, "prompts of about 600 tokens, answers of about 60 (DeepSpeed-FastGen)"),
    "exponential": ("anyscale", "gamma", 2.0, "a few very long answers, in bursts (Anyscale, 2023)"),
}


def draw(name: str) -> list[list[list[Any]]]:
    """Return the requests of a workload for each seed: time at one request per second, lengths, client, priority, seconds
    to the deadline.
    """
    from simulate import workloads

    workload, arrivals, _, _ = WORKLOADS[name]
    runs = []
    for seed in range(SEEDS):
        rows = workloads.draw(workload, 1.0, REQUESTS, seed, arrivals).hinted(seed, CLIENTS, PRIORITIES, SLO)
        columns = (rows.at.tolist(), rows.prompt.tolist(), rows.output.tolist(), rows.client, rows.priority, rows.slo)
        runs.append([list(row) for row in zip(*columns)])  # type: ignore[arg-type]  # the hints are drawn
    return runs


def sources() -> dict[str, str]:
    """Return the text of each file of Python that the page has: all policies, and what the lab imports."""
    ours = {path for path in LOADED if path.is_relative_to(ROOT / "simulate") or path.parent == ROOT / "costs"}
    files = sorted({*ours, *ROOT.glob("scheduling/*.py"), *ROOT.glob("policies/**/*.py")})
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}


def catalog(files: dict[str, str]) -> dict[str, Any]:
    """Return what the page shows before Python has been loaded."""
    shown = {name: text for name, text in files.items() if not name.startswith("simulate/")}
    return {
        "loops": {name: policies.summary(name) for name in policies.names()},
        "orders": {name: policies.order_summary(name) for name in policies.order_names()},
        "workloads": {name: {"rate": rate, "about": about} for name, (_, _, rate, about) in WORKLOADS.items()},
        "lessons": {name: lesson.title for name, lesson in LESSONS.items()},
        "files": shown,
    }


def pack(folder: Path) -> None:
    """Write the page, the archive and the catalog into a folder."""
    files = sources()
    folder.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "web" / "lab").iterdir():
        shutil.copyfile(path, folder / path.name)
    (folder / "web").mkdir(exist_ok=True)
    page = (ROOT / "web" / "lab" / "index.html").read_text("utf-8")
    for name in sorted(set(re.findall(r'"web/([\w.]+)"', page))):
        shutil.copyfile(ROOT / "web" / name, folder / "web" / name)
    (folder / "catalog.json").write_text(json.dumps(catalog(files), separators=(",", ":")), "utf-8")
    texts = files | {f"workloads/{name}.json": json.dumps(draw(name), separators=(",", ":")) for name in WORKLOADS}
    with zipfile.ZipFile(folder / "lab.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():  # one date for all, so that the same sources give the same archive
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
