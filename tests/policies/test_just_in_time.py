"""The order just-in-time: the most urgent of those that can still be on time."""

from __future__ import annotations

from typing import Any

import policies
from costs import published
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate import workloads
from simulate.simulator import simulate
from tests.support.scheduling import requests


def waiting() -> list[Sequence]:
    """Return requests of 2, 10, 4 and 9 tokens, which must be done at 20, 25, 30 and 15."""
    trace = requests((0, 1, 2), (0, 1, 10), (0, 1, 4), (0, 1, 9))
    for seq, deadline in zip(trace, (20.0, 25.0, 30.0, 15.0)):
        seq.deadline = deadline
    return trace


def test_the_latest_possible_start_decides_step_by_step() -> None:
    """By hand, at 2 s a token: they must start at 16, 5, 22 and -3. At 6, r1 is too late as well; it needs 20 s, r3 18."""
    policy: Any = policies.get_policy("dynamic+just-in-time", 1)
    policy.pace = 2.0
    for now, wanted in ((1.0, "1023"), (6.0, "0231"), (17.0, "2031"), (101.0, "0123")):
        assert "".join(seq.id[1] for seq in policy.order(waiting(), now)) == wanted
    policy.pace = 0.0  # as long as nothing is known, the nearest deadline
    assert "".join(seq.id[1] for seq in policy.order(waiting(), 1.0)) == "3012"


def test_the_margin_is_a_quantile_of_the_latest_answers() -> None:
    for quantile, pace in ((0.0, 1.0), (0.5, 9.0), (0.9, 15.0), (1.0, 16.0)):
        policy: Any = policies.get_policy("dynamic+just-in-time", 1, {"quantile": quantile})
        for seconds in range(1, 17):
            (seq,) = requests((0, 1, 4))
            seq.scheduled_at = 0.0
            policy.on_finish(seq, 4.0 * seconds)
        assert policy.pace == pace


def test_in_an_overload_more_deadlines_are_met_than_earliest_first_or_in_order_of_arrival() -> None:
    met = {}
    for order in ("fcfs", "edf", "just-in-time"):
        rows = workloads.draw("orca", 10.0, 800, 0).hinted(0, slo=(4.0, 8.0, 30.0))
        scheduler = Scheduler(policies.get_policy(f"dynamic+{order}", 16), None, 2048)
        run = simulate(scheduler, rows.sequences(), published.make("distserve-opt13b", {}))
        met[order] = sum((seq.finished_at or 0.0) <= (seq.deadline or 0.0) for seq in run.sequences) / 800
    assert met["just-in-time"] > 1.4 * max(met["fcfs"], met["edf"])
    assert met["just-in-time"] > 0.8
