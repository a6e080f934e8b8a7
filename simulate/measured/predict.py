"""Predictions for a comparison: each measured request, simulated.

It reads a folder that client.compare wrote. With a cost model of the user the arrivals are predicted. Without one
they are replayed: a step that the server took lasts as long as it did there, any other step by a law fitted to the
server's steps. The module writes `simulated.csv`, with a line per request, and `simulated.json`, with the errors, into
the folder. It must not know how pictures are drawn.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np

from client.report import store
from costs import drafting, published
from costs.cost import Cost, Host
from costs.steps import Step, step_of_members
from scheduling.iteration import Member, Plan
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import MOST
from simulate.best import blame, regret
from simulate.best.clairvoyant import KnownHits
from simulate.measured import intervals, observed_law
from simulate.measured.intervals import Noise
from simulate.measured.observed import seen
from simulate.scenario import Chosen, Engine
from simulate.simulator import Run, simulate

FEWEST_STEPS = 30  # a fit needs this many
STEP_TOKENS = 256  # of a server that does not report them
MOST_BLAMED = 200  # requests of a run, each of which is left out once
COLUMNS = ("policy", "load", "repeat", "index", "ttft_s", "simulated_ttft_s", "latency_s", "simulated_latency_s")
OWN = "each run's own steps"
Record = Mapping[str, Any]
Line = Mapping[str, str]
Members = frozenset[tuple[str, int]]  # the requests of a step, and their tokens after it, rejected ones included


class Recorded(Cost):
    """Step times from a record, including the pause before the next step; other steps take the time of a law."""

    name = "recorded"

    def __init__(self, records: Many[Record], law: Cost) -> None:
        self.law = law
        self.matched = self.steps = 0
        self.known = {members_of(record): lasted for record, lasted in zip(records, lasting(records))}

    def __call__(self, plan: Plan) -> float:
        pairs = zip(plan.sequences, plan.counts)
        charge = self.known.get(frozenset((seq.id, seq.computed + count) for seq, count in pairs))
        self.steps += 1
        self.matched += charge is not None
        return self.law(plan) if charge is None else charge


def lasting(records: Many[Record]) -> list[float]:
    """Return the seconds of each step, with the pause before the next one where its requests go on."""
    return [
        after["t"] - record["t"]
        if after is not None and after["n"] == record["n"] + 1 and _goes_on(record)
        else record["seconds"]
        for record, after in zip(records, [*records[1:], None])
    ]


def members_of(record: Record) -> Members:
    """Return the requests that computed in a step, with their tokens in cache after it."""
    wrong = rejected(record)
    return frozenset((m["id"], m["computed"] + wrong.get(m["id"], 0)) for m in record["members"] if m["tokens"])


def rejected(record: Record) -> dict[str, int]:
    """Return the rejected draft tokens of a step by request."""
    return {draft["id"]: draft["drafted"] - draft["accepted"] for draft in record.get("drafts", ())}


def _goes_on(record: Record) -> bool:
    return len(record["left"]) < len(record["members"])


def step_of(record: Record, padded: bool) -> Step:
    """Sum a step that a server reported."""
    members = (Member(m["id"], 0, m["phase"], m["tokens"], m["computed"], 0) for m in record["members"])
    return step_of_members(members, padded)


def law_of(records: Many[Record], padded: bool) -> Cost:
    """Fit a law to a server's own steps; ValueError when there are too few."""
    timed = [(step_of(record, padded), record["seconds"]) for record in records if record["seconds"] > 0]
    timed = [(step, seconds) for step, seconds in timed if step.rows]
    if len(timed) < FEWEST_STEPS:
        raise ValueError(f"only {len(timed)} steps were reported, but a fit needs {FEWEST_STEPS}. Use --cost")
    return observed_law.fit(*zip(*timed))[0]


def scheduler_of(chosen: Chosen, engine: Record, hits: Mapping[str, int]) -> Scheduler:
    """Return the scheduler of a server with this engine (of `/stats`): its slots, KV pages and tokens per step."""
    kv = engine.get("kv") or {"pages_total": 0, "page_size": 1}
    tokens_per_step = engine.get("max_tokens_per_step") or STEP_TOKENS
    kv_tokens = kv["pages_total"] * kv["page_size"]
    scheduler = Engine(engine["max_batch_size"], tokens_per_step, kv_tokens, kv["page_size"]).scheduler(chosen)
    scheduler.batch.pages = KnownHits(scheduler.pages, hits)
    return scheduler


def sequences(
    lines: Iterable[Line], records: Iterable[Record], arrivals: Mapping[str, float] | None = None
) -> list[Sequence]:
    """Return the answered requests, except those with an unknown prompt length or arrival.

    They arrive when the client sent them, or at `arrivals`. As on the server, the scheduler knows the limit of a request,
    which may be the end of the context, and not where the model will end the answer.
    """
    totals = {m["id"]: m["total"] for record in records for m in record["members"]}
    result = []
    for number, line in enumerate(lines):
        id, requested, tokens = line["id"], int(line["asked_tokens"]), int(line["output_tokens"])
        limit, total = line.get("max_tokens", str(requested)), totals.get(id, 0)
        prompt = int(line["prompt_tokens"] or (total - int(limit) if limit else 0))
        at = float(line["arrival_s"]) if arrivals is None else arrivals.get(id)
        if prompt > 0 and tokens > 0 and at is not None:
            # Its own prompt, so that it finds the pages of no other request.
            seq = Sequence([number] * prompt, max(tokens, total - prompt), id=id)
            seq.arrived_at, seq.client, seq.open_ended = at, line["client"], not limit
            seq.end_after(tokens)
            seq.answer_tokens = 0  # an oracle does not know it either
            result.append(seq)
    return result


def replay(run: Record, lines: Many[Line], records: Many[Record], law: Cost) -> tuple[Run, dict[str, Any]]:
    """Simulate a run on the server's clock; return the run, and how many of its steps equal the server's.

    Its other steps take the time of `law`.
    """
    scheduler = _scheduler(run, lines)
    cost = Recorded(records, law)
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for record in records:
        for member in record["members"]:
            began.setdefault(member["id"], record["t"])
            ended[member["id"]] = record["t"] + record["seconds"]
    arrived = {
        line["id"]: began[line["id"]] - float(line["queue_s"])
        for line in lines
        if line["queue_s"] and line["id"] in began
    }
    beside = [float(line["latency_s"]) - ended[line["id"]] + arrived[line["id"]]
              for line in lines if line["id"] in arrived]  # fmt: skip
    half = max(0.0, float(np.median(beside))) / 2 if beside else 0.0
    steps = [(record["t"], record["t"] + lasted) for record, lasted in zip(records, lasting(records))]
    served = sequences(lines, records, dict(zip(arrived, seen(arrived.values(), steps))))
    scheduler.speculator = drafting.replaying(records, str(MOST))
    simulated = simulate(scheduler, served, cost, Host(alpha1=half), fast_forward=False)
    for seq in simulated.sequences:
        seq.arrived_at = arrived[seq.id] - half
    return simulated, {"steps": cost.steps, "steps_alike": cost.matched, "beside_s": 2 * half}


def predicted(
    run: Record, lines: Many[Line], records: Many[Record], cost: Cost, host: Host, noise: Noise | None
) -> tuple[Run, dict[str, Any]]:
    """Simulate a run by a cost model; return the run, its makespan and the measured one, and intervals if there is noise."""

    def fresh(law: Cost) -> Run:
        scheduler = _scheduler(run, lines)
        scheduler.speculator = drafting.replaying(records, str(MOST))
        return simulate(scheduler, sequences(lines, records), law, host)

    simulated = fresh(cost)
    known = {seq.id for seq in simulated.done}
    times = [(float(x["arrival_s"]), float(x["latency_s"])) for x in lines if x["id"] in known]
    facts = {
        "makespan_s": max(map(sum, times), default=0.0) - min(times, default=(0.0, 0.0))[0],
        "simulated_makespan_s": simulated.makespan,
    }
    return simulated, {**facts, "intervals": noise.intervals(fresh, cost, simulated)} if noise else facts


def _scheduler(run: Record, lines: Iterable[Line]) -> Scheduler:
    """Return the scheduler of the server of a run; ValueError for a policy that does not exist here."""
    server = run.get("server_after") or {}
    engine = server.get("engine")
    if not engine:
        raise ValueError("the server reports neither policy nor slots (/stats)")
    chosen = Chosen(server["policy"], engine.get("policy_options") or {})
    return scheduler_of(chosen, engine, {line["id"]: int(line["cached_tokens"] or 0) for line in lines})


def predict(folder: Path, cost: str | None = None) -> dict[str, Any]:
    """Simulate every run of a comparison, write the predictions, and return their errors.

    Runs of servers that do not report their policy, or of too few steps, are left out with the reason.
    """
    results = store.read(folder)
    step_cost = published.make(cost) if cost else None
    host = published.host_of(cost) if cost else Host()
    noise = intervals.of_cost(cost) if cost else None
    rows: list[Many[Any]] = []
    compared, left_out = [], []
    for short in results.runs:
        labels = {name: short[name] for name in store.LABELS}
        lines = results.lines(labels["policy"], labels["load"])
        lines = [line for line in lines if line["repeat"] == str(labels["repeat"])]
        records, run = results.iterations(**labels), results.whole(short)
        try:
            law = step_cost or law_of(records, _scheduler(run, lines).policy.padded)
            if step_cost is None:
                simulated, facts = replay(run, lines, records, law)
            else:
                simulated, facts = predicted(run, lines, records, step_cost, host, noise)
            pairs = _beside(simulated, lines)
            compared.append({**labels, **errors(pairs), **facts, **truth(run, lines, records, law, host)})
            rows += [(*labels.values(), *each) for each in pairs]
        except (ValueError, KeyError) as error:
            left_out.append({**labels, "why": str(error)})
    summary = {"cost": cost or OWN, "compared": compared, "left_out": left_out}
    if rows:
        _write(folder, rows, summary)
    return summary


def truth(run: Record, lines: Many[Line], records: Many[Record], law: Cost, host: Host) -> dict[str, Any]:
    """Return how far the policy of a run is from the best possible, and which clients made which wait, with steps of `law`.

    There is no blame for runs of one client or of many requests.
    """

    def fresh() -> tuple[Scheduler, list[Sequence]]:
        return _scheduler(run, lines), sequences(lines, records)

    scheduler, served = fresh()
    base = simulate(scheduler, served, law, host)
    figures = {"regret": regret.sentence(regret.of(base, law, scheduler, fresh))}
    if len(served) > MOST_BLAMED or len({seq.client for seq in served}) < 2:
        return figures
    return {**figures, "blame": blame.of(fresh, law, host, run=base).by_client()}


def _beside(run: Run, lines: Iterable[Line]) -> list[tuple[Any, ...]]:
    """Return index, measured and simulated TTFT, measured and simulated latency of each request."""
    if not run.done:
        raise ValueError("no request reports the length of its prompt")
    by_id = {line["id"]: line for line in lines}
    result = []
    for seq, ttft, latency in zip(run.done, run.ttft.tolist(), run.latency.tolist()):
        line = by_id[seq.id]
        result.append((int(line["index"]), line["ttft_s"], ttft, float(line["latency_s"]), latency))
    return result


def errors(pairs: Many[tuple[Any, ...]]) -> dict[str, Any]:
    """Return measured and simulated mean and p99 of the latency, and the mean error of single requests."""
    measured, simulated = (np.array([row[i] for row in pairs]) for i in (3, 4))
    return {
        "requests": len(pairs),
        "mean_s": float(measured.mean()),
        "simulated_mean_s": float(simulated.mean()),
        "p99_s": float(np.percentile(measured, 99)),
        "simulated_p99_s": float(np.percentile(simulated, 99)),
        "mape": float(np.abs(simulated / measured - 1).mean()),
    }


def _write(folder: Path, rows: Many[Many[Any]], summary: Mapping[str, Any]) -> None:
    (folder / "simulated.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    with (folder / "simulated.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for *labels, ttft, simulated_ttft, latency, simulated in rows:
            times = (f"{seconds:.6f}" for seconds in (simulated_ttft, latency, simulated))
            writer.writerow([*labels, ttft, *times])
