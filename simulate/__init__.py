"""The server's own scheduler and policies on a virtual clock, with a cost where the model would be.

`./eb simulate --help` lists the commands, and `from simulate import run, sweep` has them in Python (`experiment.py`). A run
is a `Scenario` (`scenario.py`), which `simulator.py` serves. No torch, no flask, no threads, no weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulate.experiment import run as run
    from simulate.experiment import sweep as sweep


def __getattr__(name: str) -> Any:
    """Load Python's front when it is used: a run in a browser has only what `simulator.py` needs."""
    if name in ("run", "sweep"):
        from simulate import experiment

        return getattr(experiment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
