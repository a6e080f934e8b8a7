"""A simulated run told like a measured one: the same keys, the same files, so the same tables and plots.

`summary.json` has the keys of the client's result (times in ms where the name says so, arrays in seconds), with
`simulation` beside them; `requests.csv` a line for each request; `iterations.jsonl` the record of each step.
"""

from __future__ import annotations

import csv
import hashlib
import json
import platform
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from client import measure
from scheduling.sequence import Sequence
from simulate.simulator import Run

ARRAYS = ("input_lens", "output_lens", "ttfts", "itls", "e2els", "errors")
COLUMNS = ("index", "id", "client", "arrival_s", "prompt_tokens", "cached_tokens", "asked_tokens",
           "output_tokens", "queue_s", "ttft_s", "latency_s", "batch_mean", "batch_max", "outcome")  # fmt: skip


def gaps_of(run: Run) -> dict[str, tuple[float, ...]]:
    """Return the seconds between the tokens of each request, as far as its steps were recorded."""
    times: dict[str, list[float]] = {seq.id: [] for seq in run.sequences}
    prompts = {seq.id: len(seq.prompt_ids) for seq in run.sequences}
    for record in run.iterations:
        for m in record.members:
            if m.phase == "decode" or (m.phase == "prefill" and m.computed >= prompts[m.id]):
                times[m.id].append(record.t + record.seconds)
    return {id: tuple(b - a for a, b in pairwise(at)) for id, at in times.items()}


def outcome(
    index: int, seq: Sequence, run: Run, gaps: Mapping[str, tuple[float, ...]]
) -> measure.Outcome:
    """Return what a client that sent this request on time would have seen, from the start of the run.

    It tells of tokens one by one only where steps were recorded.
    """
    sent = seq.arrived_at - run.host.alpha0 - run.began
    told: dict[str, Any] = {"prompt_tokens": len(seq.prompt_ids), "cached_tokens": seq.cached}
    if seq.id in gaps and seq.first_token_at is not None:
        told |= {"first": seq.first_token_at - run.began, "gaps": gaps[seq.id]}
        told["chunks"] = (1,) * (len(gaps[seq.id]) + 1)
    if seq.scheduled_at is not None:
        told["queue"] = seq.scheduled_at - run.began - sent
    if seq.iterations:
        told |= {"batch_mean": seq.batch_sum / seq.iterations, "batch_max": seq.batch_max}
    finished = seq.finish_reason in ("length", "stop")
    return measure.Outcome(
        index=index,
        asked_tokens=seq.max_tokens,
        intended=sent,
        sent=sent,
        ended=(seq.finished_at or 0.0) + run.host.alpha1 - run.began,
        tokens=len(seq.output_ids) if finished else 0,
        error="" if finished else str(seq.finish_reason),
        id=seq.id,
        user=seq.client,
        **told,
    )


def trace_sha256(run: Run) -> str:
    """Name the arrivals by their contents: equal exactly when times and lengths are."""
    rows = [
        (seq.arrived_at - run.host.alpha0, len(seq.prompt_ids), seq.max_tokens, seq.client)
        for seq in run.sequences
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def goodput(run: Run, ttft: float | None, tpot: float | None, e2el: float | None) -> float | None:
    """Return the requests a second that meet all the limits given (seconds); None when none is given."""
    if ttft is None and tpot is None and e2el is None:
        return None
    good = np.ones(len(run.done), bool)
    if ttft is not None:
        good &= run.ttft <= ttft
    if tpot is not None:
        good &= tpots(run) <= tpot
    if e2el is not None:
        good &= run.latency <= e2el
    return float(good.sum() / run.makespan)


def tpots(run: Run) -> np.ndarray:
    """Return (latency - TTFT) / (tokens - 1) of each request, 0 for a single token."""
    n = run.tokens
    return np.where(n > 1, (run.latency - run.ttft) / np.maximum(n - 1, 1), 0.0)


def result(
    run: Run,
    *,
    config: Mapping[str, Any],
    seed: int = 0,
    request_rate: float = float("inf"),
    date: str = "",
    limits: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Build the result object of a run; `config` is what repeats it."""
    facts = measure.RunFacts(
        date=date,
        config=config,
        seed=seed,
        trace_sha256=trace_sha256(run),
        request_rate=request_rate,
        burstiness=None,
        num_prompts=len(run.sequences),
        server_before=None,
        server_after={"policy": run.policy},
        machine={"simulated": True, "cost": config.get("cost")},
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
        },
    )
    gaps = gaps_of(run) if run.iterations else {}
    numbers = measure.result([outcome(i, s, run, gaps) for i, s in enumerate(run.sequences)], facts)
    many = run.tokens > 1
    wanted = limits or {}
    numbers |= {
        "backend": "effective-batching simulate",
        "model_id": config.get("cost"),
        "request_goodput": goodput(run, wanted.get("ttft"), wanted.get("tpot"), wanted.get("e2el")),
        **measure.statistics_ms("ttft", run.ttft.tolist()),
        **measure.statistics_ms("tpot", tpots(run)[many].tolist()),
        **measure.statistics_ms("itl", np.frombuffer(run.gaps) if run.gaps else []),
        "ttfts": run.ttft.tolist(),
    }
    numbers["simulation"] = summary(run)
    return numbers


def summary(run: Run) -> dict[str, Any]:
    """Return what only a simulation knows: steps, how busy the engine was, and how the slots were spent."""
    told: dict[str, Any] = {
        "steps": run.steps,
        "admissions": run.batches,
        "mean_joined": len(run.done) / run.batches if run.batches else None,
        "busy": run.busy / run.makespan if run.makespan else None,
        "mean_queue_ms": float(run.waiting.mean() * 1000) if run.done else None,
        "refused": len(run.sequences) - len(run.done),
    }
    if run.iterations:
        kinds = run.iterations[0].slot_steps._fields
        spent = np.array([i.slot_steps for i in run.iterations]).sum(axis=0)
        told["waste"] = dict(zip(kinds, (spent / spent.sum()).tolist()))
        told["mean_batch"] = float(np.mean([i.batch_size for i in run.iterations]))
    return told


def write(run: Run, numbers: Mapping[str, Any], folder: Path) -> None:
    """Write summary.json, requests.csv and, if steps were recorded, iterations.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(numbers, indent=1) + "\n")
    with (folder / "requests.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(_row(i, seq, run) for i, seq in enumerate(run.sequences))
    if run.iterations:
        with (folder / "iterations.jsonl").open("w") as file:
            file.writelines(json.dumps(i.to_dict()) + "\n" for i in run.iterations)


def _row(index: int, seq: Sequence, run: Run) -> tuple[Any, ...]:
    at = seq.arrived_at - run.host.alpha0

    def since(time: float | None, more: float = 0.0) -> str:
        return "" if time is None else f"{time + more - at:.6f}"

    return (
        index, seq.id, seq.client, f"{at:.6f}", len(seq.prompt_ids), seq.cached, seq.max_tokens, len(seq.output_ids),
        since(seq.scheduled_at), since(seq.first_token_at), since(seq.finished_at, run.host.alpha1),
        f"{seq.batch_sum / seq.iterations:.3f}" if seq.iterations else "", seq.batch_max, seq.finish_reason,
    )  # fmt: skip
