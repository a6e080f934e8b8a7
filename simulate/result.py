"""The result of a simulated run, in the keys and files of a measured one, for the same tables and plots.

The folder is that of `client.compare`, written by the client's own code: summary.json, runs/*.json (with `simulation`
beside the client's keys), requests.csv, iterations.jsonl.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from client.report import conversations, measure, store
from costs import published
from scheduling.sequence import Sequence
from simulate.rows import Rows
from simulate.simulator import Run

MACHINE = {"processor": "simulated"}  # in place of a machine, whose times the cost model has


class Chunks(NamedTuple):
    """The tokens of an answer as a stream carries them: the seconds between steps with some, and how many each has."""

    gaps: tuple[float, ...]
    tokens: tuple[int, ...]


def chunks_of(run: Run) -> dict[str, Chunks]:
    """Return the chunks of each request, as far as its steps were recorded."""
    times: dict[str, list[tuple[float, int]]] = {seq.id: [] for seq in run.sequences}
    prompts = {seq.id: len(seq.prompt_ids) for seq in run.sequences}
    for record in run.iterations:
        accepted = {draft.id: draft.accepted for draft in record.drafts}
        for m in record.members:
            if m.phase == "decode" or (m.phase == "prefill" and m.computed >= prompts[m.id]):
                times[m.id].append((record.t + record.seconds, 1 + accepted.get(m.id, 0)))
    return {
        id: Chunks(tuple(b - a for (a, _), (b, _) in pairwise(some)), tuple(tokens for _, tokens in some))
        for id, some in times.items()
    }


def outcome(index: int, seq: Sequence, run: Run, chunks: Mapping[str, Chunks]) -> measure.Outcome:
    """Return the outcome that a client would have recorded, in seconds from the start of the run.

    Chunks are in it only if steps were recorded.
    """
    sent = seq.arrived_at - run.host.alpha0 - run.began
    details: dict[str, Any] = {"prompt_tokens": len(seq.prompt_ids), "cached_tokens": seq.cached}
    if seq.first_token_at is not None:
        details["first"] = seq.first_token_at - run.began
    if seq.id in chunks:
        details |= {"gaps": chunks[seq.id].gaps, "chunks": chunks[seq.id].tokens}
    if seq.scheduled_at is not None:
        details["queue"] = seq.scheduled_at - run.began - sent
    if seq.iterations:
        details |= {"batch_mean": seq.batch_sum / seq.iterations, "batch_max": seq.batch_max}
    finished = seq.finish_reason in ("length", "stop")
    return measure.Outcome(
        index=index,
        asked_tokens=seq.answer_tokens or seq.max_tokens,
        intended=sent,
        sent=sent,
        ended=(seq.finished_at or 0.0) + run.host.alpha1 - run.began,
        tokens=len(seq.output_ids) if finished else 0,
        error="" if finished else str(seq.finish_reason),
        id=seq.id,
        user=seq.client,
        program=seq.program,
        max_tokens=None if seq.open_ended else seq.max_tokens,
        **details,
    )


def tpots(run: Run) -> np.ndarray:
    """Return (latency - TTFT) / (tokens - 1) of each request, 0 for a single token."""
    n = run.tokens
    return np.where(n > 1, (run.latency - run.ttft) / np.maximum(n - 1, 1), 0.0)


def result(
    run: Run,
    *,
    config: Mapping[str, Any],
    rows: Rows | None = None,
    seed: int = 0,
    date: str = "",
    limits: Mapping[str, float | None] | None = None,
    brief: bool = False,
) -> dict[str, Any]:
    """Build the result object of a run; `config` repeats it, and `rows` are its requests.

    A `brief` result has no intervals within the run, which take longer than the run itself.
    """
    arrivals = rows.arrivals if rows else None
    slos = {name: 1000 * limit for name, limit in (limits or {}).items() if limit}
    chunks = chunks_of(run) if run.iterations else {}
    outcomes = [outcome(i, s, run, chunks) for i, s in enumerate(run.sequences)]
    numbers = conversations.result(
        outcomes,
        {},
        slos=slos,
        has_intervals=not brief,
        date=date,
        num_prompts=run.requests,
        request_rate=float(f"{rows.rate:.9g}") if rows else math.inf,  # the one that was asked for, not a neighbor
        burstiness=arrivals.burstiness if arrivals else None,
        max_concurrency=None,
        warmup_requests=0,
        seed=seed,
        trace_sha256=rows.sha256 if rows and not brief else "",
        config=config,
        machine=MACHINE,
        versions=versions(),
        server_before=None,
        server_after={"policy": run.policy, "engine": engine(run, config)},
    )
    if any(seq.deadline is not None for seq in run.sequences) and numbers["duration"]:
        good = sum(met(s, run) and measure.meets(o, slos) for s, o in zip(run.sequences, outcomes))
        numbers["request_goodput"] = good / numbers["duration"]
    numbers |= {
        "backend": "effective-batching simulate",
        "model_id": published.called(str(config.get("cost"))),
        **measure.statistics_ms("itl", run.gaps),
        "simulation": {**summary(run), **store.speculation(numbers)},
    }
    if not chunks:
        numbers |= {"itls": None, "max_output_tokens_per_s": None}
    return numbers


def summary(run: Run) -> dict[str, Any]:
    """Return the figures that only a simulation has: steps, utilization and how the slots were spent."""
    figures: dict[str, Any] = {
        "steps": run.steps,
        "admissions": run.batches,
        "mean_joined": run.answered / run.batches if run.batches else None,
        "busy": run.busy / run.makespan if run.makespan else None,
        "mean_queue_ms": float(run.waiting.mean() * 1000) if run.answered else None,
        "refused": run.requests - run.answered,
        "preemptions": sum(seq.preemptions for seq in run.sequences),
        "cached": sum(s.cached for s in run.sequences) / max(sum(len(s.prompt_ids) for s in run.sequences), 1),
        **by_hint(run),
    }
    if run.iterations:
        spent = slot_steps(run)
        figures["waste"] = {kind: number / sum(spent.values()) for kind, number in spent.items()}
        figures["mean_batch"] = float(np.mean([i.batch_size for i in run.iterations]))
    return figures


def slot_steps(run: Run) -> dict[str, float]:
    """Return how the slots of all recorded steps were spent, by use."""
    kinds = run.iterations[0].slot_steps._fields
    return dict(zip(kinds, np.array([i.slot_steps for i in run.iterations]).sum(axis=0).tolist()))


def by_hint(run: Run) -> dict[str, Any]:
    """Return the means of each client, and the share of deadlines met."""
    figures: dict[str, Any] = {}
    names = np.array([seq.client for seq in run.done])
    if any(names):
        figures["clients"] = {
            str(name): {
                "requests": int((names == name).sum()),
                "mean_ttft_ms": float(run.ttft[names == name].mean() * 1000),
                "mean_e2el_ms": float(run.latency[names == name].mean() * 1000),
            }
            for name in np.unique(names)
        }
    wanted = [seq for seq in run.sequences if seq.deadline is not None]
    if wanted:
        figures["deadlines_met"] = sum(met(seq, run) for seq in wanted) / len(wanted)
    return figures


def met(seq: Sequence, run: Run) -> bool:
    """Return whether a request was answered before its deadline, if it had one."""
    in_time = (seq.finished_at or 0.0) + run.host.alpha1 <= (math.inf if seq.deadline is None else seq.deadline)
    return seq.finish_reason in ("length", "stop") and in_time


def engine(run: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine as the server's `/stats` describes it; slot steps and batches only if steps were recorded."""
    facts: dict[str, Any] = {
        "model": config.get("cost"),
        "max_batch_size": config.get("max_batch_size"),
        "max_tokens_per_step": config.get("max_tokens_per_step"),
        "iterations": run.steps,
        "preemptions": sum(seq.preemptions for seq in run.sequences),
        "drafts": {
            "times": run.drafts,
            "tokens": sum(seq.drafted for seq in run.sequences),
            "accepted": sum(seq.accepted for seq in run.sequences),
        },
    }
    if found := sum(seq.cached for seq in run.sequences):
        facts["kv"] = {"query_tokens": sum(len(seq.prompt_ids) for seq in run.sequences), "hit_tokens": found}
    if run.iterations:
        facts["slot_steps"] = slot_steps(run)
        sizes = Counter(i.batch_size for i in run.iterations)
        facts["batch_stats"] = [{"batch_size": n, "count": sizes[n]} for n in sorted(sizes)]
    return facts


def versions() -> dict[str, str]:
    """Return the versions of what computes the figures."""
    return {"python": platform.python_version(), "numpy": np.__version__, "scipy": version("scipy")}


def keep(folder: store.Store, load: str, repeat: int, run: Run, numbers: Mapping[str, Any]) -> None:
    """Write a run into the folder of a comparison."""
    labels = {"policy": run.policy, "load": load, "repeat": repeat}
    write = folder.record(labels)
    chunks = chunks_of(run) if run.iterations else {}
    for i, seq in enumerate(run.sequences):
        write(outcome(i, seq, run, chunks))
    mark = json.dumps(labels)[:-1]
    for record in run.iterations:
        folder.iterations.write(f"{mark}, {json.dumps(record.to_dict())[1:]}\n")
    folder.add(labels, numbers)
