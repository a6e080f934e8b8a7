"""The simulator's word on a comparison, asked for as a user would: `python -m simulate predict FOLDER`.

The client knows no more of the simulator; where it is installed alone there is none.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from ..console import UsageError, say

ROOT = Path(__file__).resolve().parents[2]


def is_here() -> bool:
    """Tell whether there is a simulator beside this client."""
    return (ROOT / "simulate" / "__main__.py").is_file()


def check(cost: str) -> str:
    """Refuse a file of `calibrate` that is not there; give its whole path."""
    if not cost.endswith(".json"):
        return cost
    if not Path(cost).is_file():
        raise ValueError(f"{cost!r} is not a file. Create one with python -m simulate calibrate --out FILE.json")
    return str(Path(cost).resolve())


def predict(folder: Path, cost: str | None, console: Console) -> None:
    """Let the simulator serve the same requests; what it cannot is said, and nothing measured is touched."""
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
