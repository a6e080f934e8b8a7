"""What a server has served, as its simulators see it: the requests, the engine, the policy, and the questions about them.

A simulator is a process that answers questions, one after the other, until its input ends: lines of JSON with rows
("requests" and "steps", in pieces) and then one with "ask". This module must not know the questions.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import policies
from costs.cost import Cost, Host
from costs.drafting import Recorded, RecordedDrafter
from costs.steps import Step
from scheduling.located import described, locate_error
from scheduling.pages import PagePool
from scheduling.policy import Policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from simulate.hook_limit import HookTimeout, limited
from simulate.simulator import Run, simulate

LOWEST_PRIORITY = 19


class Seen(NamedTuple):
    """A finished request: its arrival, its lengths, and its latency in seconds (None: the answer was incomplete).

    `pages` names its full pages, of prompt and answer, by numbers, equal where their tokens and all before them are.
    `drafts`: of each step with drafts, the place in the answer, their number, and how many were accepted.
    """

    at: float
    prompt: int
    tokens: int
    latency: float | None
    client: str = ""
    priority: int = 0
    deadline: float | None = None
    open_ended: bool = False
    limit: int = 0  # max_tokens
    pages: Rows[int] = ()
    drafts: Rows[Rows[int]] = ()


@dataclass(frozen=True)
class Machine:
    """The engine: slots, tokens per step, KV pages (0: no pages), and draft tokens per sequence (None: what is worth it)."""

    slots: int
    tokens_per_step: int = 2048
    pages: int = 0
    page_size: int = 16
    drafts: int | None = 0


@dataclass(frozen=True)
class Chosen:
    """A policy by its name, with its options."""

    name: str
    options: dict[str, Any]

    def policy(self, machine: Machine) -> Policy:
        """Return a new policy for the slots of an engine."""
        return policies.get_policy(self.name, machine.slots, self.options)


def sequences(trace: Rows[Seen]) -> list[Sequence]:
    """Return fresh sequences, whose answers end after as many tokens as on the server."""
    result = [
        Sequence(
            [0] * seen.prompt, max(seen.tokens, seen.limit), id=str(i), arrived_at=seen.at, client=seen.client,
            priority=seen.priority, deadline=seen.deadline, open_ended=seen.open_ended,
            hashes=[page.to_bytes(8, "big") for page in seen.pages],
        )
        for i, seen in enumerate(trace)
    ]  # fmt: skip
    for seq, seen in zip(result, trace):
        seq.end_after(seen.tokens)
    return result


def fresh(trace: Rows[Seen], policy: Chosen, machine: Machine) -> tuple[Scheduler, list[Sequence]]:
    """Return a new scheduler of an engine, and fresh sequences, with the draft tokens that they had."""
    pages = PagePool(machine.pages + 1, machine.page_size) if machine.pages else None
    drafter = RecordedDrafter({str(i): Recorded.of(seen.drafts) for i, seen in enumerate(trace)})
    speculator = None if machine.drafts == 0 else Speculator(drafter, machine.drafts)
    scheduler = Scheduler(policy.policy(machine), pages, machine.tokens_per_step, speculator=speculator)
    return scheduler, sequences(trace)


def serve(trace: Rows[Seen], policy: Chosen, machine: Machine, cost: Cost, host: Host, *, records: bool = False) -> Run:
    """Simulate one policy on the trace; with `records`, keep the Iteration of each step."""
    return simulate(*fresh(trace, policy, machine), cost, host, records=records)


def converse(
    answer_from: Callable[[dict[str, list[Any]], dict[str, Any]], dict[str, Any]],
    lines: Iterable[str] = sys.stdin,
    out: TextIO = sys.stdout,
) -> None:
    """Answer questions with a function of the rows and the question; an answer reports what failed."""
    os.nice(LOWEST_PRIORITY)
    rows: defaultdict[str, list[Any]] = defaultdict(list)
    for line in lines:
        message = json.loads(line)
        if "ask" not in message:
            for name, piece in message.items():
                rows[name] += piece
            continue
        try:
            with limited():
                text = json.dumps(answer_from(rows, message["ask"]), allow_nan=False)
        except HookTimeout as error:
            text = json.dumps({"problem": f"PolicyFailed: {error}"})
        except Exception as error:  # a policy may come from anywhere
            text = json.dumps({"problem": problem(error)})
        rows.clear()
        print(text, file=out, flush=True)


def problem(error: Exception) -> str:
    """Return the type of an error and what it says; of a policy's, with the hook, file and line that raised it."""
    words = described(error)
    place = locate_error(error)
    if place is None or place.hook == "__init__":  # options are refused there
        return words
    return f"PolicyFailed: the policy failed in the simulation, in {place}: {words}. Correct it, or use another policy"


def seen_in(rows: dict[str, list[Any]]) -> tuple[list[Seen], list[tuple[Step, float]]]:
    """Return the requests and the measured steps that a server has sent."""
    return [Seen(*row) for row in rows["requests"]], [(Step(*row[:-1]), row[-1]) for row in rows["steps"]]
