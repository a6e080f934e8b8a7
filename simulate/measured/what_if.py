"""How other policies would have served a server's requests: the figures of each and the record of every step.

`python -m simulate.measured.what_if` answers questions (see `simulate/measured/observed.py`). The served policy has two lanes, measured and
simulated, whose difference shows how reliable the others are. It must not know HTTP or how requests are observed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from costs.cost import Cost, Scaled
from costs.steps import Step, beyond, seen_in, step_of_members
from scheduling.iteration import SlotSteps
from scheduling.scheduler import Scheduler
from scheduling.stretches import Stretch
from simulate.best import blame, program_blame, regret
from simulate.closed_loop import ClosedLoop
from simulate.measured.lanes import MAX_WEIGHT, cut, records, stretches
from simulate.measured.observed import Observed, converse, seen
from simulate.scenario import Chosen, Scenario
from simulate.simulator import simulate
from simulate.trace import Seen, Trace

MOST_STRANGE = 0.05  # of the steps of a lane may have sizes that were not measured
LONGEST_WAKE = 0.05  # seconds of an idle loop; a policy that waits for more requests waits longer
COMPARED = ("latency_mean_s", "latency_p99_s", "makespan_s")
MOST_OFF = 0.2  # of a measured time: a simulation that is further off explains nothing,
LEAST_OFF = 0.005  # unless it is off by less than these seconds


def seconds_of(stretch: Stretch, cost: Cost, padded: bool) -> float:
    """Return how long a law says that the steps take, with the masks that they waited for, without what passes between."""
    members, passed = stretch.members, stretch.steps - 1
    last = [m._replace(computed=m.computed + passed * m.tokens) for m in members]
    ends = [cost.seconds(step_of_members(rows, padded)) for rows in (members, last)]  # costs grow evenly between them
    return stretch.steps * sum(ends) / 2 + stretch.mask_seconds


def slowness(scenario: Scenario[Trace], steps: Sequence[Stretch]) -> float:
    """Return how many times as long as in the scenario the server took for these steps and for what it did between them.

    Time in which it had nothing to do, or its policy waited for more requests, does not count.
    """
    padded, taken, simulated = scenario.asked[0].padded, 0.0, 0.0
    for step in steps:
        taken += step.ended - step.t
        simulated += seconds_of(step, scenario.cost, padded) + step.steps * scenario.host.sigma
    last: dict[int, Stretch] = {}  # by engine
    for later in steps:
        engine = later.rows[0] if later.rows else 0
        step, last[engine] = last.get(engine, later), later
        between = later.t - step.ended
        if step is not later and (len(step.members) > len(step.left) or (step.queue and between < LONGEST_WAKE)):
            taken += between
    return taken / simulated if simulated else 1.0


def slowed(scenario: Scenario[Trace], factor: float) -> Scenario[Trace]:
    """Return a scenario in which steps, and what the server does between them, take `factor` times as long."""
    host = replace(scenario.host, sigma=scenario.host.sigma * factor)
    return replace(scenario, cost=Scaled(scenario.cost, factor), host=host)


def extrapolates(steps: Iterable[Stretch], padded: bool, timed: Iterable[Step]) -> bool:
    """Return whether steps are larger than all that were measured, or much smaller, in a part that matters."""
    sizes, strange, count = seen_in(timed), 0, 0
    for stretch in steps:
        count += stretch.steps
        strange += stretch.steps * (beyond(sizes, step_of_members(stretch.members, padded)) > 1)
    return strange > MOST_STRANGE * count


@dataclass(frozen=True)
class Lane:
    """One policy on the requests: its figures, as the answer has them, and its steps."""

    figures: dict[str, Any]
    steps: Sequence[Stretch]


def as_it_was(server: Observed) -> Scenario[Trace]:
    """Return the scenario in which all requests arrive when the loop saw them, and its steps take as long as they did.

    The fit leaves out steps that took far longer than others, and a busy machine has many of them. What slowed this load would
    have slowed any policy. A burst would begin with a batch of one request if an idle loop did not take a moment to wake.
    """
    scenario, trace = server.scenario, server.scenario.rows.seen
    steps = (
        [] if scenario.engine.engines else server.stretches
    )  # several engines share a loop that is never between steps
    at = seen((one.at for one in trace), ((step.t, step.ended) for step in steps), LONGEST_WAKE)
    scenario = replace(scenario, rows=Trace([one._replace(at=time) for one, time in zip(trace, at)]))
    return scenario if server.cost else slowed(scenario, slowness(scenario, server.stretches))


def bound(scenario: Scenario[Trace]) -> dict[str, Any] | None:
    """Return how far the served policy is from the lower bound of the mean latency, as simulated; None without a bound."""
    if scenario.engine.engines:
        return None
    again = partial(scenario.fresh, *scenario.policies)
    scheduler, sequences = again()
    run = simulate(scheduler, sequences, scenario.cost, scenario.host)
    figures = regret.of(run, scenario.cost, scheduler, again)
    if not figures:
        return None
    shares = {"above": figures["above_least_mean_e2el"], "above_by": figures.get("above_by")}
    return {"latency_mean_s": figures["least_mean_e2el_ms"] / 1000, **shares}


def measured(server: Observed) -> Lane:
    """Return the lane of what the server did; without slot shares if the first of its steps are no longer recorded."""
    trace, steps = server.scenario.rows.seen, server.stretches
    timed = [seen for seen in trace if seen.latency is not None]
    ends = [seen.at + seen.latency for seen in timed if seen.latency is not None]
    whole = {id for step in steps for id in step.joined}.issuperset(server.ids)
    times = np.array([seen.latency for seen in timed], float)
    figures = {
        "policy": server.scenario.asked[0].name, "measured": True, "whole": whole,
        **times_of(times, sum(seen.tokens for seen in trace), max(ends) - trace[0].at),
        **shares_of(steps if whole else ()),
    }  # fmt: skip
    return Lane(figures, steps)


def simulated(server: Observed, scenario: Scenario[Trace], chosen: Chosen, trace: Trace) -> Lane:
    """Return the lane of a policy in a scenario in which the requests of `trace` arrive when the loop sees them.

    Calls of programs come after their parents, as long as they did on the server.

    The figures are about the requests that the measured ones are about.
    """
    rows = replace(scenario.rows, closed=trace.closed)
    run = replace(scenario, rows=rows).serve(chosen, records=True)
    steps = stretches(run.iterations)
    late = [seen.at - one.at for seen, one in zip(rows.seen, trace.seen)]
    came = {int(seq.id): seq.arrived_at - late[int(seq.id)] for seq in run.sequences}
    done = [(int(seq.id), seq.finished_at or 0.0) for seq in run.done]
    latency = np.array([end - came[i] for i, end in done if trace.seen[i].latency is not None])
    if not len(latency):
        raise ValueError(f"{run.policy} served none of the requests. Choose another policy")
    padded = chosen.policy(scenario.engine.slots).padded
    figures = {
        "policy": run.policy, "options": chosen.options, "measured": False, "whole": len(run.done) == len(trace.seen),
        **times_of(latency, int(run.tokens.sum()), run.ended - trace.seen[0].at), **shares_of(steps),
        "extrapolates": not server.cost and extrapolates(steps, padded, (step for step, _ in server.timed)),
        "arrived": [round(came.get(i, one.at) - trace.seen[0].at, 6) for i, one in enumerate(trace.seen)] if run.loop else None,
    }  # fmt: skip
    return Lane(figures, steps)


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


def draw(name: str, rate: float, count: int, seed: int, context: int) -> Trace:
    """Return the requests of a named workload."""
    from simulate import workloads  # which most questions do not need

    rows = workloads.draw(name, rate, count, seed, context=context)
    columns = zip(rows.at.tolist(), rows.prompt.tolist(), rows.output.tolist())
    return Trace([Seen(at, prompt, tokens, 0.0) for at, prompt, tokens in columns])


def is_close(measured: float, simulated: float) -> bool:
    """Return whether a simulated time is near enough to the measured one to explain it."""
    return bool(abs(simulated - measured) <= max(MOST_OFF * measured, LEAST_OFF))


def explains(real: Sequence[float], again: np.ndarray) -> bool:
    """Return whether a simulated request waits about as long as the real one, and takes about as long in all."""
    return is_close(real[0], again[0]) and is_close(sum(real), again.sum())


def blame_from(server: Observed, id: str) -> dict[str, Any]:
    """Return which others made a request wait or slowed its tokens, as simulated, and how long it really took.

    A queue is the sum of all steps before it: if the simulation is off, all steps are made slower or faster once, by what the
    server really took for those up to the request's end.
    """
    scenario, place, basis = as_it_was(server), server.ids.index(id), server.basis
    one, asked = server.scenario.rows.seen[place], str(place)
    latency = one.latency or 0.0
    real = (one.waited, latency - one.waited)
    late = np.array([scenario.rows.seen[place].at - one.at, 0.0])  # until the loop saw it
    run = scenario.serve(*scenario.policies)
    if not all(explains(real, late + blame.parts_of(seq)) for seq in run.done if seq.id == asked):
        factor = slowness(scenario, [step for step in server.stretches if step.t < one.at + latency])
        scenario = slowed(scenario, factor)
        run, basis = scenario.serve(*scenario.policies), {**basis, "scaled_by": factor}
    found = blame.of(partial(scenario.fresh, *scenario.policies), scenario.cost, scenario.host, asked, run)
    found = replace(found, took=found.took + late, alone=found.alone + late)
    told = found.of_request(server.ids)
    for part, seconds, again in zip(blame.PARTS, real, found.took[0]):
        told[part] = {"measured": round(1000 * seconds, 3), "trusted": is_close(seconds, again), **told[part]}
    return {
        "id": id, "client": one.client, "policy": scenario.asked[0].name, "trusted": explains(real, found.took[0]),
        "latency_ms": {"measured": 1000 * latency, "simulated": 1000 * float(found.took.sum())},
        **told, "program": program_from(server, scenario, place), "cost": basis,
    }  # fmt: skip


def program_from(server: Observed, scenario: Scenario[Trace], place: int) -> dict[str, Any] | None:
    """Return which other programs delayed the program of a request, until its answer, in a closed loop.

    None for a request without a program, with several engines, or where the simulation does not answer all calls.
    """
    rows, ids = scenario.rows, server.ids
    one = rows.seen[place]
    if not one.program or scenario.engine.engines:
        return None

    def again() -> tuple[Scheduler, ClosedLoop]:
        return scenario.fresh(*scenario.policies)[0], rows.loop()

    try:
        found = program_blame.of(again, scenario.cost, scenario.host, rows.loop_name(place))
    except ValueError:
        return None
    calls = [i for i, seen in enumerate(rows.seen) if seen.program == one.program]
    real = server.scenario.rows.seen
    took = max(real[i].at + (real[i].latency or 0.0) for i in calls) - rows.seen[calls[0]].at
    known = {rows.loop_name(i): i for i in range(len(ids))}
    others = []
    for row in found["by"]:
        other = known[row["program"]]
        name = {"program": real[other].program} if real[other].program else {"id": ids[other]}
        others.append({**name, "ms": _ms(row["s"]), "call": ids[calls[row["call"]]], "call_ms": _ms(row["call_s"])})
    return {
        "name": one.program, "calls": len(calls), "trusted": is_close(took, found["took_s"]),
        "measured_ms": _ms(took), "simulated_ms": _ms(found["took_s"]),
        "alone_ms": _ms(found["alone_s"]), "residual_ms": _ms(found["residual_s"]),
        "others": [other for other in others if abs(other["ms"]) >= blame.LEAST], "left_out": found["left_out"],
    }  # fmt: skip


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def answer_from(rows: dict[str, list[Any]], ask: dict[str, Any]) -> dict[str, Any]:
    """Return a lane for each policy; the served one has two, measured (unless a workload is named) and simulated."""
    server = Observed.of(rows, ask)
    if "blame" in ask:
        return blame_from(server, ask["blame"])
    if ask["workload"] is not None:
        trace = draw(**ask["workload"])
        ids, scenario, lanes = [str(i) for i in range(len(trace.seen))], replace(server.scenario, rows=trace), []
    else:
        trace, ids, scenario, lanes = server.scenario.rows, server.ids, as_it_was(server), [measured(server)]
    served, slots = scenario.policies[0], scenario.engine.slots
    distinct = {(served.policy(slots).name, "{}"): served}  # the question may name the served policy, too
    for chosen in (type(served)(name, ask.get("options", {}).get(name, {})) for name in ask["policies"]):
        distinct.setdefault((chosen.policy(slots).name, str(chosen.options)), chosen)
    lanes += [simulated(server, scenario, chosen, trace) for chosen in distinct.values()]
    zero, end = trace.seen[0].at, cut((lane.steps for lane in lanes), MAX_WEIGHT)
    names = {id: str(i) for i, id in enumerate(ids)}
    error = None
    if ask["workload"] is None:
        real, again = lanes[0].figures, lanes[1].figures
        error = {name: again[name] / real[name] - 1 for name in COMPARED}
    return {
        "served": scenario.asked[0].name,
        "slots": sum(scenario.engine.engines) or scenario.engine.slots,
        "engines": len(scenario.engine.engines) or 1,
        "requests": [
            {"id": id, "t": round(one.at - zero, 6), "prompt_tokens": one.prompt, "output_tokens": one.tokens}
            for id, one in zip(ids, trace.seen)
        ],
        "lanes": [lane.figures | {"records": records(lane.steps, zero, end, names)} for lane in lanes],
        "bound": bound(scenario),
        "error": error,
        "cut_s": None if end is None else round(end - zero, 6),
        "cost": server.basis,
    }  # fmt: skip


if __name__ == "__main__":
    converse(answer_from)
