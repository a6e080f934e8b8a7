"""The simulator's predictions for a comparison, from `python -m simulate predict FOLDER`.

The client knows nothing else about the simulator, and works without it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from terminal.console import say
from terminal.options import UsageError

ROOT = Path(__file__).resolve().parents[2]


def is_here() -> bool:
    """Return whether the simulator is installed beside this client."""
    return (ROOT / "simulate" / "__main__.py").is_file()


def check(cost: str) -> str:
    """Return the absolute path of a cost file, or a cost model's name; raise ValueError for a missing file."""
    if not cost.endswith(".json"):
        return cost
    if not Path(cost).is_file():
        raise ValueError(f"{cost!r} is not a file. Create one with python -m simulate calibrate --out FILE.json")
    return str(Path(cost).resolve())


def predict(folder: Path, cost: str | None, console: Console) -> None:
    """Simulate the same requests beside the measured ones; report what cannot be simulated."""
    if not is_here():
        if cost:
            raise UsageError(f"--cost {cost} needs the simulator, but this client was installed without it")
        return
    command = [sys.executable, "-m", "simulate", "predict", str(folder.resolve())]
    command += ["--cost", cost] if cost else []
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        say(console, f"note: no simulated times: {done.stderr.strip()}")
    elif cost:
        say(console, done.stderr.rstrip())
    elif (folder / "simulated.json").is_file():
        for run in json.loads((folder / "simulated.json").read_text("utf-8"))["compared"]:
            say(console, f"{run['policy']}, {run['load']}, as simulated: {run['regret']}")
