"""Which programs delayed another one: the closed loop runs again, each time without one of those beside it.

A program that takes L alone takes T. Without program q it would take T - b_q: its own calls then come at other times, too. So b_q
is the delay of the whole task, not only of one call. The rest, T - L - sum of b_q, is the residual, as in `blame.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from costs.cost import Cost, Host
from scheduling.scheduler import Scheduler
from simulate.best.blame import MOST_OTHERS, MOST_REPLAYED
from simulate.closed_loop import ClosedLoop
from simulate.simulator import simulate


def of(again: Callable[[], tuple[Scheduler, Any]], cost: Cost, host: Host, asked: str = "") -> dict[str, Any]:
    """Return the seconds by which each other program delayed the named one, or the slowest one, largest first.

    `again` makes a fresh scheduler and the closed loop. `by` also names the call that the other delayed most, by its number.
    ValueError if not all calls of the program are answered, in the run and alone. Others without which they are not are
    left out.
    """

    def serve(keep: Callable[[str], bool]) -> tuple[ClosedLoop, dict[str, float]]:
        scheduler, loop = again()
        simulate(scheduler, loop.keep([*filter(keep, loop.programs)]), cost, host)
        return loop, loop.times(host.alpha1)

    def calls(loop: ClosedLoop) -> list[float]:
        return [(seq.finished_at or 0.0) - seq.arrived_at for seq in loop.programs[asked]]

    everyone, times = serve(lambda name: True)
    asked = asked or max(times, key=times.__getitem__, default="")
    alone = serve(asked.__eq__)[1].get(asked) if asked in times else None
    if alone is None:
        raise ValueError(
            f"program {asked!r} is not in the run, or not all its calls have an answer. Choose another one"
        )
    begin = everyone.began
    beside = {
        name: min(begin[name] + times[name], begin[asked] + times[asked]) - max(begin[name], begin[asked])
        for name in times
    }
    others = sorted((name for name in beside if beside[name] > 0 and name != asked), key=lambda name: -beside[name])
    by: list[dict[str, Any]] = []
    most = min(MOST_OTHERS, MOST_REPLAYED // len(everyone.sequences))
    left_out = len(others[most:])
    for other in others[:most]:
        without, less = serve(other.__ne__)
        if asked not in less:  # calls at other times may be refused
            left_out += 1
            continue
        delays = [mine - shorter for mine, shorter in zip(calls(everyone), calls(without))]
        worst = max(range(len(delays)), key=delays.__getitem__)
        by.append({"program": other, "s": times[asked] - less[asked], "call": worst, "call_s": delays[worst]})
    by.sort(key=lambda row: -row["s"])
    residual = times[asked] - alone - sum(row["s"] for row in by)
    return {
        "program": asked,
        "took_s": times[asked],
        "alone_s": alone,
        "residual_s": residual,
        "by": by,
        "left_out": left_out,
    }


def sentence(found: dict[str, Any]) -> str:
    """Say how long a program took, and which three others delayed it the most."""
    worst = "; ".join("{program} by {s:.2f} s, call {call} by {call_s:.2f} s".format(**row) for row in found["by"][:3])
    return "{program} took {took_s:.2f} s, alone {alone_s:.2f} s".format(**found) + f"; delayed by {worst or 'none'}"
