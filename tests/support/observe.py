"""A run on a virtual clock, and a recording that watched it as it would watch a server."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

import policies
from batching import Inference
from costs.cost import Affine, Cost
from costs.steps import Step
from observe.replay.recording import Recording
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.speculation import Speculator
from simulate.measured import observed
from simulate.simulator import Run, simulate

COST = Affine(base=0.02, token=0.0004, row=0.0007, context=2e-6, prefill=0.003)
SLOTS = 8


def inferences(count: int = 120, rate: float = 6.0) -> list[Inference]:
    """Return Poisson arrivals of prompts whose beginnings recur, with their pages' hashes."""
    rng = np.random.default_rng(5)
    made, now = [], 0.0
    pool = PagePool(2000, 16)
    for _ in range(count):
        now += float(rng.exponential(1 / rate))
        prompt = [int(rng.integers(3))] * 48 + [7] * int(rng.integers(1, 60))
        one = Inference("", int(rng.integers(1, 90)), prompt)
        one.sequence.arrived_at = now
        one.sequence.hashes = pool.hashes(prompt)
        made.append(one)
    return made


def served(policy: str, people: list[Inference], cost: Cost | None = None, speculator: Speculator | None = None) -> Run:
    """Serve them on a virtual clock, which stands for the real server."""
    made = policies.get_policy(policy, SLOTS)
    scheduler = Scheduler(made, PagePool(2000, 16), 256, speculator=speculator)
    return simulate(scheduler, [one.sequence for one in people], cost or COST, records=True)


def manager(policy: str = "dynamic", pages: PagePool | None = None, speculator: Speculator | None = None) -> Any:
    made = policies.get_policy(policy, SLOTS)
    return SimpleNamespace(
        policy=made, policy_name=made.name, policy_options={}, max_batch_size=SLOTS, max_tokens_per_step=256,
        pages=pages or PagePool(2000, 16), speculator=speculator,
    )  # fmt: skip


def watch(recording: Recording, run: Run, people: list[Inference]) -> None:
    """Let the recording see a run as it happened: arrivals, and each step with who left in it."""
    by_id = {one.id: one for one in people}
    coming = sorted(people, key=lambda one: one.sequence.arrived_at)
    for record in run.iterations:
        end = record.t + record.seconds
        while coming and coming[0].sequence.arrived_at <= end:
            recording.on_arrival(coming.pop(0))
        recording.observe(record, [by_id[id] for id, _ in record.left])


class Uneven(Affine):
    """Every tenth step takes 15 times as long, as on a machine that does something else as well."""

    steps = itertools.count()

    def seconds(self, step: Step) -> float:
        return super().seconds(step) * (15.0 if next(self.steps) % 10 == 0 else 1.0)


def recorded(
    policy: str = "dynamic", cost: Cost | None = None, speculator: Speculator | None = None,
    people: list[Inference] | None = None,
) -> tuple[Recording, Run, Any]:  # fmt: skip
    people = people or inferences()
    run = served(policy, people, cost, speculator)
    server = manager(policy, speculator=speculator)
    recording = Recording(lambda: server.policy.padded, clock=lambda: run.ended)
    watch(recording, run, people)
    return recording, run, server


def answer_to(question: Iterable[str], answer_from: Callable[..., Any]) -> dict[str, Any]:
    """Return the answer of the code that simulates in a process of its own, called here."""
    out = io.StringIO()
    observed.converse(answer_from, io.StringIO("".join(question)), out)
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer
