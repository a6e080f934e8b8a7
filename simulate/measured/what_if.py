"""How other policies would have served a server's requests: the figures of each and the record of every step.

`python -m simulate.measured.what_if` answers questions (see `simulate/measured/observed.py`). The served policy has two lanes, measured and
simulated, whose difference shows how reliable the others are. It must not know HTTP or how requests are observed.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from costs import mock
from costs.cost import Cost, Host, Scaled
from costs.steps import Step, step_of_members
from scheduling.iteration import SlotSteps
from scheduling.stretches import Stretch, Stretches
from simulate.best import blame, regret
from simulate.measured.lanes import MAX_WEIGHT, cut, records
from simulate.measured.observed import Chosen, Machine, Seen, converse, fresh, seen_in, serve
from simulate.measured.observed_law import law
from simulate.simulator import simulate

MOST_STRANGE = 0.05  # of the steps of a lane may have sizes that were not measured
LONGEST_WAKE = 0.05  # seconds of an idle loop; a policy that waits for more requests waits longer
COMPARED = ("latency_mean_s", "latency_p99_s", "makespan_s")


def adjusted(cost: Cost, host: Host, steps: Iterable[Stretch], padded: bool, *, is_known: bool) -> tuple[Cost, Host]:
    """Return the law with which the recorded steps take as long as they did.

    The fit leaves out steps that took far longer than others, and a busy machine has many of them. What slowed this load would
    have slowed any policy: a fitted law by a factor, one that `is_known` by a moment in each step.
    """
    taken = predicted = 0.0
    count = 0
    for stretch in steps:
        members, passed = stretch.first_members(), stretch.steps - 1
        last = [m._replace(computed=m.computed + passed * m.tokens) for m in members]
        ends = [
            cost.seconds(step_of_members(rows, padded)) for rows in (members, last)
        ]  # costs grow evenly between them
        taken += stretch.ended - stretch.t
        predicted += stretch.steps * sum(ends) / 2 + passed * host.sigma
        count += stretch.steps
    if not predicted:
        return cost, host
    if is_known:
        return cost, replace(host, sigma=max(0.0, host.sigma + (taken - predicted) / count))
    factor = taken / predicted
    return Scaled(cost, factor), replace(host, sigma=host.sigma * factor)


def extrapolates(steps: Iterable[Stretch], padded: bool, timed: Iterable[Step]) -> bool:
    """Return whether steps are larger than all that were measured, or much smaller, in a part that matters.

    Steps with prompts are compared with such steps, and others with others.
    """
    known: dict[bool, tuple[float, float]] = {}  # smallest and largest
    for step in timed:
        low, high = known.get(bool(step.prompt), (np.inf, 0))
        known[bool(step.prompt)] = min(low, step.tokens), max(high, step.tokens)
    strange = count = 0
    for stretch in steps:
        step = step_of_members(stretch.first_members(), padded)
        low, high = known.get(bool(step.prompt), (np.inf, 0))
        count += stretch.steps
        strange += 0 if low / 2 <= step.tokens <= high else stretch.steps
    return strange > MOST_STRANGE * count


def seen_at(trace: Rows[Seen], ids: Rows[str], steps: Iterable[Stretch]) -> list[float]:
    """Return when the loop saw each request: an idle one takes a moment to wake, and sees all that came meanwhile at once.

    Otherwise a burst would begin with a batch of one request where the real server found several.
    """
    arrived = {id: seen.at for id, seen in zip(ids, trace)}
    seen = [one.at for one in trace]
    idle_since = -np.inf
    for step in steps:
        first = min((arrived[id] for id in step.joined if id in arrived), default=-np.inf)
        if idle_since <= first and step.t - first < LONGEST_WAKE:
            seen = [step.t if first <= at <= step.t else at for at in seen]
        idle_since = step.ended
    return seen


def seen_then(trace: Rows[Seen], at: Rows[float]) -> list[Seen]:
    """Return the requests with these arrivals."""
    return [one._replace(at=time) for one, time in zip(trace, at)]


def bound(trace: Rows[Seen], policy: Chosen, machine: Machine, cost: Cost, host: Host) -> dict[str, Any] | None:
    """Return how far a policy is from the lower bound of the mean latency, as simulated; None where there is no bound."""
    scheduler, served = fresh(trace, policy, machine)
    again = partial(fresh, trace, policy, machine)
    figures = regret.of(simulate(scheduler, served, cost, host), cost, scheduler, again)
    if not figures:
        return None
    shares = {"above": figures["above_least_mean_e2el"], "above_by": figures.get("above_by")}
    return {"latency_mean_s": figures["least_mean_e2el_ms"] / 1000, **shares}


def measured(trace: Rows[Seen], ids: Rows[str], steps: Rows[Stretch]) -> dict[str, Any]:
    """Return the lane of what the server did; without slot shares if the first of its steps are no longer recorded."""
    timed = [seen for seen in trace if seen.latency is not None]
    ends = [seen.at + seen.latency for seen in timed if seen.latency is not None]
    joined = {id for step in steps for id in step.joined}
    whole = joined.issuperset(ids)
    times = np.array([seen.latency for seen in timed], float)
    makespan = max(ends) - trace[0].at
    return {
        "measured": True, "whole": whole, **times_of(times, sum(seen.tokens for seen in trace), makespan),
        **shares_of(steps if whole else ()),
    }  # fmt: skip


def simulated(
    trace: Rows[Seen], at: Rows[float], policy: Chosen, machine: Machine, cost: Cost, host: Host
) -> tuple[dict[str, Any], list[Stretch]]:
    """Return the lane of a policy that sees the requests at these times, and its steps.

    The figures are about the requests that the measured ones are about.
    """
    run = serve(seen_then(trace, at), policy, machine, cost, host, records=True)
    recorded = Stretches()
    for iteration in run.iterations:
        recorded.add(iteration)
    done = [(seq.finished_at or 0.0, trace[int(seq.id)]) for seq in run.done]
    latency = np.array([end - one.at for end, one in done if one.latency is not None])
    if not len(latency):
        raise ValueError(f"{run.policy} served none of the requests. Choose another policy")
    lane = {
        "policy": run.policy, "measured": False, "whole": len(run.done) == len(trace),
        **times_of(latency, int(run.tokens.sum()), run.ended - trace[0].at), **shares_of(recorded.kept),
    }  # fmt: skip
    return lane, list(recorded.kept)


def times_of(latency: np.ndarray, tokens: int, makespan: float) -> dict[str, float]:
    """Return the figures of a lane that are times."""
    return {
        "requests": len(latency),
        "latency_mean_s": float(latency.mean()),
        "latency_p99_s": float(np.percentile(latency, 99)),
        "makespan_s": float(makespan),
        "tokens_per_s": float(tokens / makespan),
    }


def shares_of(steps: Iterable[Stretch]) -> dict[str, Any]:
    """Return how the slots were spent, as shares of all slots in all steps; None without steps."""
    sums = SlotSteps(*(sum(column) for column in zip(*([part * s.steps for part in s.slot_steps] for s in steps))))
    total = sum(sums)
    return {
        "useful": sums.useful / total if total else None,
        "held": sums.held / total if total else None,
        "batch_fill": sums.fill,
        "rows_in_vain": sums.in_vain,
    }


def draw(name: str, rate: float, count: int, seed: int, context: int) -> list[Seen]:
    """Return the requests of a named workload."""
    from simulate import workloads

    rows = workloads.draw(name, rate, count, seed, context=context)
    columns = zip(rows.at.tolist(), rows.prompt.tolist(), rows.output.tolist())
    return [Seen(at, prompt, tokens, 0.0) for at, prompt, tokens in columns]


def as_it_was(
    trace: Rows[Seen], rows: dict[str, list[Any]], padded: bool, cost: Cost, host: Host, name: str
) -> tuple[list[float], list[Stretch], Cost, Host]:
    """Return when the loop saw the requests, its steps, and the law with which these take as long as they did."""
    steps = [Stretch(*row) for row in rows["stretches"]]
    if not name or mock.is_mock(name):
        cost, host = adjusted(cost, host, steps, padded, is_known=bool(name))
    return seen_at(trace, rows["ids"], steps), steps, cost, host


def blame_from(rows: dict[str, list[Any]], ask: dict[str, Any]) -> dict[str, Any]:
    """Return which others made a request wait or slowed its tokens, as simulated, and how long it really took."""
    trace, timed = seen_in(rows)
    machine, served = Machine(*ask["machine"]), Chosen(*ask["served"])
    cost, host, basis = law(timed, ask["sigma"], ask["cost"])
    padded = served.policy(machine).padded
    at, _, cost, host = as_it_was(trace, rows, padded, cost, host, ask["cost"])
    place = rows["ids"].index(ask["blame"])
    found = blame.of(partial(fresh, seen_then(trace, at), served, machine), cost, host, str(place))
    one = trace[place]
    latency = {"measured": one.latency, "simulated": float(found.took.sum()) + at[place] - one.at}
    return {
        "id": ask["blame"], "client": one.client, "policy": served.policy(machine).name,
        "latency_ms": {name: 1000 * seconds for name, seconds in latency.items() if seconds is not None},
        **found.of_request(rows["ids"]), "cost": basis,
    }  # fmt: skip


def answer_from(rows: dict[str, list[Any]], ask: dict[str, Any]) -> dict[str, Any]:
    """Return the lanes: of the served policy as it was (unless a workload is named) and as simulated, and of the others."""
    if "blame" in ask:
        return blame_from(rows, ask)
    trace, timed = seen_in(rows)
    machine, served = Machine(*ask["machine"]), Chosen(*ask["served"])
    cost, host, basis = law(timed, ask["sigma"], ask["cost"])
    lanes: list[tuple[dict[str, Any], list[Stretch]]] = []
    if ask["workload"] is not None:
        trace = draw(**ask["workload"])
        ids, at = [str(i) for i in range(len(trace))], [one.at for one in trace]
    else:
        ids, policy = rows["ids"], served.policy(machine)
        at, steps, cost, host = as_it_was(trace, rows, policy.padded, cost, host, ask["cost"])
        lanes.append(({"policy": policy.name, **measured(trace, ids, steps)}, steps))
    for chosen in distinct([served, *(Chosen(name, {}) for name in ask["policies"])], machine):
        lane, steps = simulated(trace, at, chosen, machine, cost, host)
        padded = chosen.policy(machine).padded
        lane["extrapolates"] = not ask["cost"] and extrapolates(steps, padded, (step for step, _ in timed))
        lanes.append((lane, steps))
    zero = trace[0].at
    end = cut((steps for _, steps in lanes), MAX_WEIGHT)
    names = {id: str(i) for i, id in enumerate(ids)}
    return {
        "served": lanes[0][0]["policy"],
        "slots": machine.slots,
        "requests": [
            {"id": id, "t": round(one.at - zero, 6), "prompt_tokens": one.prompt, "output_tokens": one.tokens}
            for id, one in zip(ids, trace)
        ],
        "lanes": [
            lane | {"records": records((s for s in steps if end is None or s.t < end), names, zero)}
            for lane, steps in lanes
        ],
        "bound": bound(seen_then(trace, at), served, machine, cost, host),
        "error": _error(*(lane for lane, _ in lanes[:2])) if lanes[0][0]["measured"] else None,
        "cut_s": None if end is None else round(end - zero, 6),
        "cost": basis,
    }  # fmt: skip


def distinct(wanted: Iterable[Chosen], machine: Machine) -> list[Chosen]:
    """Return the policies without repetitions, such as the served one among those of the question."""
    first: dict[str, Chosen] = {}
    for chosen in wanted:
        first.setdefault(chosen.policy(machine).name, chosen)
    return list(first.values())


def _error(real: dict[str, Any], simulated: dict[str, Any]) -> dict[str, float]:
    return {name: simulated[name] / real[name] - 1 for name in COMPARED}


if __name__ == "__main__":
    converse(answer_from)
