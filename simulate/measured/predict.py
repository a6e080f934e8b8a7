"""Predictions for a comparison: each measured request, simulated.

`client.compare` runs it as a process on the folder that it wrote. With a cost model of the user the arrivals are predicted. Without one
they are replayed: a step that the server took lasts as long as it did there, any other step by a law fitted to the
server's steps. The module writes `simulated.csv`, with a line per request, and `simulated.json`, with the errors, into
the folder. It must not know how pictures are drawn.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from client.report import store
from costs import published
from costs.cost import Cost, Host
from scheduling.iteration import Plan
from simulate.best import blame, regret
from simulate.measured import intervals, observed_law
from simulate.measured.intervals import Noise
from simulate.measured.observed import seen
from simulate.measured.recorded import FEWEST_STEPS
from simulate.measured.served import Record, Served, lasting, step_of
from simulate.scenario import Chosen
from simulate.simulator import Run, simulate

MOST_BLAMED = 200  # requests of a run, each of which is left out once
COLUMNS = ("policy", "load", "repeat", "index", "ttft_s", "simulated_ttft_s", "latency_s", "simulated_latency_s")
OWN = "each run's own steps"
Members = frozenset[tuple[str, int]]  # the requests of a step, and their tokens after it, rejected ones included


class Recorded(Cost):
    """Step times from a record, including the pause before the next step; other steps take the time of a law."""

    name = "recorded"

    def __init__(self, records: Sequence[Record], law: Cost) -> None:
        self.law = law
        self.matched = self.steps = 0
        self.known = {members_of(record): lasted for record, lasted in zip(records, lasting(records))}

    def __call__(self, plan: Plan) -> float:
        pairs = zip(plan.sequences, plan.counts)
        charge = self.known.get(frozenset((seq.id, seq.computed + count) for seq, count in pairs))
        self.steps += 1
        self.matched += charge is not None
        return self.law(plan) if charge is None else charge


def members_of(record: Record) -> Members:
    """Return the requests that computed in a step, with their tokens in cache after it."""
    wrong = {draft["id"]: draft["drafted"] - draft["accepted"] for draft in record.get("drafts", ())}
    return frozenset((m["id"], m["computed"] + wrong.get(m["id"], 0)) for m in record["members"] if m["tokens"])


def law_of(records: Sequence[Record], padded: bool) -> Cost:
    """Fit a law to a server's own steps; ValueError when there are too few."""
    timed = [(step_of(r, padded), r["seconds"]) for r in records if r["members"] and r["seconds"] > 0]
    if len(timed) < FEWEST_STEPS:
        raise ValueError(f"only {len(timed)} steps were reported, but a fit needs {FEWEST_STEPS}. Use --cost")
    return observed_law.fit(*zip(*timed))[0]


def replay(served: Served, law: Cost) -> tuple[Run, dict[str, Any]]:
    """Simulate a run on the server's clock; return the run, and how many of its steps equal the server's.

    Its other steps take the time of `law`.
    """
    records, cost, host = served.records, Recorded(served.records, law), served.host()
    arrived = {id: times[0] for id, times in served.clocked().items()}
    steps = [(record["t"], record["t"] + lasted) for record, lasted in zip(records, lasting(records))]
    arrivals = dict(zip(arrived, seen(arrived.values(), steps)))
    simulated = served.simulate(cost, Host(alpha1=host.alpha1), arrivals, fast_forward=False)
    for seq in simulated.sequences:
        seq.arrived_at = arrived[seq.id] - host.alpha0
    return simulated, {"steps": cost.steps, "steps_alike": cost.matched, "beside_s": host.alpha0 + host.alpha1}


def predicted(served: Served, cost: Cost, host: Host, noise: Noise | None) -> tuple[Run, dict[str, Any]]:
    """Simulate a run by a cost model; return the run, its makespan and the measured one, and intervals if there is noise."""
    simulated = served.simulate(cost, host)
    known = {seq.id for seq in simulated.done}
    times = [(o.intended, o.ended) for o in served.outcomes if o.id in known] or [(0.0, 0.0)]
    facts: dict[str, Any] = {
        "makespan_s": max(end for _, end in times) - min(times)[0],
        "simulated_makespan_s": simulated.makespan,
    }
    if noise:
        facts["intervals"] = noise.intervals(lambda law: served.simulate(law, host), cost, simulated)
    return simulated, facts


def served_of(results: store.Results, short: Record) -> Served:
    """Return a run of a comparison; ValueError if its server does not report its policy."""
    server = results.whole(short).get("server_after") or {}
    engine = server.get("engine")
    if not engine:
        raise ValueError("the server reports neither policy nor slots (/stats)")
    chosen = Chosen(server["policy"], engine.get("policy_options") or {})
    lines = [line for line in results.lines(short["policy"], short["load"]) if line["repeat"] == str(short["repeat"])]
    records = results.iterations(*(short[name] for name in store.LABELS))
    return Served(chosen, [store.outcome_of(line) for line in lines], records, engine)


def predict(folder: Path, cost: str | None = None) -> dict[str, Any]:
    """Simulate every run of a comparison, write the predictions, and return their errors.

    Runs of servers that do not report their policy, or of too few steps, are left out with the reason.
    """
    results = store.read(folder)
    step_cost = published.make(cost) if cost else None
    host = published.host_of(cost) if cost else Host()
    noise = intervals.of_cost(cost) if cost else None
    rows: list[Sequence[Any]] = []
    compared, left_out = [], []
    for short in results.runs:
        labels = {name: short[name] for name in store.LABELS}
        try:
            served = served_of(results, short)
            law = step_cost or law_of(served.records, served.scheduler().policy.padded)
            simulated, facts = predicted(served, law, host, noise) if step_cost else replay(served, law)
            pairs = beside(simulated, served)
            compared.append({**labels, **errors(pairs), **facts, **truth(served, law, host)})
            rows += [(*labels.values(), *each) for each in pairs]
        except (ValueError, KeyError) as error:
            left_out.append({**labels, "why": str(error)})
    summary = {"cost": cost or OWN, "compared": compared, "left_out": left_out}
    if rows:
        _write(folder, rows, summary)
    return summary


def truth(served: Served, law: Cost, host: Host) -> dict[str, Any]:
    """Return how far the policy of a run is from the best possible, and which clients made which wait, with steps of `law`.

    There is no blame for runs of one client or of many requests.
    """
    scheduler, sequences = served.fresh()
    base = simulate(scheduler, sequences, law, host)
    figures = {"regret": regret.sentence(regret.of(base, law, scheduler, served.fresh))}
    if len(sequences) > MOST_BLAMED or len({seq.client for seq in sequences}) < 2:
        return figures
    return {**figures, "blame": blame.of(served.fresh, law, host, run=base).by_client()}


def beside(run: Run, served: Served) -> list[tuple[Any, ...]]:
    """Return index, measured and simulated TTFT, measured and simulated latency of each request."""
    if not run.done:
        raise ValueError("no request reports the length of its prompt")
    by_id = {o.id: o for o in served.outcomes}
    times = zip((by_id[seq.id] for seq in run.done), run.ttft.tolist(), run.latency.tolist())
    return [(o.index, o.ttft, ttft, o.latency, latency) for o, ttft, latency in times]


def errors(pairs: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return measured and simulated mean and p99 of the latency, and the mean error of single requests."""
    measured, simulated = (np.array([row[i] for row in pairs]) for i in (3, 4))
    result: dict[str, Any] = {"requests": len(pairs), "mape": float(np.abs(simulated / measured - 1).mean())}
    for side, latency in (("", measured), ("simulated_", simulated)):
        result |= {f"{side}mean_s": float(latency.mean()), f"{side}p99_s": float(np.percentile(latency, 99))}
    return result


def _write(folder: Path, rows: Sequence[Sequence[Any]], summary: Mapping[str, Any]) -> None:
    (folder / "simulated.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    with (folder / "simulated.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row])


def main(folder: str, cost: str = "") -> None:
    """Predict the runs in a folder; end with the reason on stderr if it cannot be read."""
    try:
        left_out = predict(Path(folder), cost)["left_out"]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    for run in left_out:
        print(f"note: {run['policy']}, {run['load']} left out: {run['why']}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
