"""When the steps end that are sure to equal each other but for the length of their rows.

Such a stretch is gone through without a plan for each step. This module must not know who waits, or what ends a stretch.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from itertools import accumulate, islice, repeat
from operator import sub

from costs.cost import Cost, Host
from costs.steps import Step
from scheduling.advance import Output, TokenRun
from scheduling.driver import tokens_due
from scheduling.iteration import Plan


def step_ends(
    cost: Cost, host: Host, plan: Plan, spent: float, now: float, most: int, until: float = math.inf
) -> tuple[list[float], list[float], float]:
    """Return the ends of up to `most` steps that equal a plan of decodes, those before `until`, and their seconds.

    The first takes `spent` seconds. The last value is how long the step after them takes.
    """
    if cost.flat:
        return *_equally_long(now, spent, most, until), spent
    step, live = cost.step(plan), len(plan.sequences)
    overhead = host.seconds(live)
    longest = max(seq.computed for seq in plan.sequences) + 1
    ends: list[float] = []
    seconds: list[float] = []
    for _ in range(most):
        now += spent
        if until <= now:
            break
        ends.append(now)
        seconds.append(spent)
        longest += 1
        step = Step(
            step.decodes, step.context + live, 0, 0, 0.0, 0,
            longest if longest > step.longest else step.longest, 1, step.work + live, step.masks,
        )  # fmt: skip
        spent = cost.seconds(step) + overhead
    return ends, seconds, spent


def _equally_long(now: float, spent: float, most: int, until: float) -> tuple[list[float], list[float]]:
    """Return the same for steps that all take `spent` seconds, which are added up one by one, as single steps are."""
    if spent > 0 and (until - now) / spent < most:
        most = int((until - now) / spent) + 2  # one more than enough, whatever rounding does
    ends = list(islice(accumulate(repeat(spent, most), initial=now), 1, None))
    del ends[bisect_left(ends, until) :]
    return ends, [spent] * len(ends)


def step_seconds(cost: Cost, host: Host, plan: Plan) -> float:
    """Return how long one step takes. Requests that come too late for it are removed."""
    if host.late and len(late := plan.joined) < len(plan.sequences):
        plan.remove(late)
        plan.joined, plan.paused = late, plan.paused + late
    due = sum(output is not None for output in tokens_due(plan)) if host.alpha2 else 0
    return cost(plan) + host.seconds(due)


def gaps_of_step(plan: Plan, outputs: list[Output], now: float) -> list[float]:
    """Return the seconds between tokens that the members of a plan see when it ends now; a run's tokens share its time."""
    if not plan.drafts:
        known = plan.decoding  # these got their last tokens at the same time
        pairs = zip(plan.sequences[known:], outputs[known:])
        gaps = [now - (seq.last_token_at or 0.0) for seq in plan.sequences[:1]] * known
        return gaps + [now - s.last_token_at for s, due in pairs if due is not None and s.last_token_at is not None]
    gaps = []
    for seq, output in zip(plan.sequences, outputs):
        if output is not None and seq.last_token_at is not None:
            tokens = len(output.ids) if isinstance(output, TokenRun) else 1
            gaps += [(now - seq.last_token_at) / tokens] * tokens
    return gaps


def gaps_between(plan: Plan, ends: list[float]) -> array[float]:
    """Return the seconds between tokens that the members of a plan of decodes see when steps end at these times."""
    first = array("d", [ends[0] - (seq.last_token_at or 0.0) for seq in plan.sequences])
    return first + array("d", map(sub, ends[1:], ends)) * len(plan.sequences)
