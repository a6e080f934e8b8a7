"""`./eb vllm replay RECORD`: let this project's own scheduler decide a recorded run again, and count the steps that are equal.

Arrivals, cancellations, switches, times and the lengths of answers come from the record. The scheduler decides again who joins, who
is preempted and how many tokens each row computes, and keeps its own pages. vLLM need not be installed.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from math import inf
from pathlib import Path
from typing import Any
from zlib import crc32

from engines.failsafe import make_policy
from scheduling.iteration import Plan
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence

Line = dict[str, Any]
CLOSE = 1e-6  # seconds by which times of the record may be rounded
HINTS = ("client", "priority", "deadline", "open_ended", "adapter", "session", "program", "constrained")


def main(argv: list[str]) -> None:
    """Print what came of each record; exit with 1 if one cannot be read."""
    parser = argparse.ArgumentParser("./eb vllm replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("record", nargs="+", metavar="RECORD", help="a file that ./eb vllm serve --record wrote")
    for path in parser.parse_args(argv).record:
        try:
            lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
            print(f"{path}: {Replay(lines).run()}", flush=True)  # noqa: T201
        except (OSError, ValueError, LookupError, TypeError) as error:
            words = f"error: {path}: {type(error).__name__}: {error}. Name a file that ./eb vllm serve --record wrote"
            raise SystemExit(words) from None


class Replay:
    """A record, and the scheduler that decides it again."""

    def __init__(self, lines: list[Line]) -> None:
        self._head, *rest = lines
        self._steps = [line for line in rest if "members" in line]
        self._events = deque(line for line in rest if "before" in line)
        self._lengths: dict[str, int] = {id: n for step in self._steps for id, n in step["outputs"].items()}
        finds = any("arrive" in line and line["pages"] for line in rest)
        pool = PagePool(self._head["pages"] + 1, self._head["page_size"], prefix_cache=finds)
        policy = make_policy(self._head["policy"], self._head["slots"], self._head["options"])
        self._scheduler = Scheduler(policy, pool, self._head["tokens"], record=False)
        self._sequences: dict[str, Sequence] = {}
        self._open = deque[tuple[Line, Plan, dict[Sequence, int]]]()  # steps, and the tokens that rows had before
        self._planned: dict[Sequence, int] = {}  # tokens that are computed once all open steps are
        self._same, self._same_joins, self._first = 0, 0, ""

    def run(self) -> str:
        """Return the shares of equal steps and joins, and the first difference, as text."""
        for step in self._steps:
            while self._events and self._events[0]["before"] <= step["n"]:
                self._commit_until(self._events[0]["now"])
                self._happen(self._events.popleft())
            self._commit_until(step["t"])
            self._plan(step)
        self._commit_until(inf)
        steps, followed = max(1, len(self._steps)), sum("planned" not in step for step in self._steps)
        return (
            f"{steps:,} steps of {self._head['policy']}. vLLM computed what was planned in {followed / steps:.2%}. Decided again: "
            f"{self._same / steps:.2%} of the steps and {self._same_joins / steps:.2%} of the joins are equal{self._first}"
        )

    def _happen(self, line: Line) -> None:
        """Let a request arrive or leave, or another policy take over."""
        if "switch" in line:
            name, options = line["switch"]["policy"], line["switch"]["options"]
            self._scheduler.switch(make_policy(name, self._head["slots"], options), line["now"])
        elif "cancel" in line:
            self._scheduler.remove_all([self._sequences[line["cancel"]]], line["now"], line["reason"])
        else:
            hashes = [b"%d" % page for page in line["pages"]]
            hints = {name: line[name] for name in HINTS if name in line}
            ids = line["arrive"], line["at"]
            seq = Sequence([0] * line["prompt"], line["max_tokens"], *ids, hashes=hashes, **hints)
            seq.sampling = crc32(seq.id.encode()) >> 1  # its tokens: those of answers differ
            seq.end_after(self._lengths.get(seq.id, 0))
            self._sequences[seq.id] = seq
            self._scheduler.add(seq)

    def _plan(self, step: Line) -> None:
        """Plan a step; if others are open, vLLM plans ahead: a row that waits for its last token computes nothing then."""
        plan = self._scheduler.plan_ahead(step["t"]) or Plan(step["n"], step["t"], [], [])
        ahead = {seq for _, other, _ in self._open for seq in other.sequences}
        before = {seq: self._planned[seq] if seq in ahead else seq.computed for seq in plan.sequences}
        left, counts = self._head["tokens"], list[int]()
        for seq, count in zip(plan.sequences, plan.counts):
            ends = seq in ahead and before[seq] >= seq.length and len(seq.output_ids) + 1 >= seq.max_tokens
            counts.append(0 if ends else min(count, left))  # a padded plan may have more tokens than vLLM allows
            left -= counts[-1]
            self._planned[seq] = before[seq] + counts[-1]
            seq.computed = min(self._planned[seq], seq.length - 1)
        plan.counts = counts
        plan.pause([seq for seq, count in zip(plan.sequences, counts) if not count])
        self._open.append((step, plan, before))

    def _commit_until(self, now: float) -> None:
        """Give the rows of steps that are over by now their tokens, and compare them with the record, which has these rows."""
        while self._open and (ends := self._open[0][0]["t"] + self._open[0][0]["seconds"]) <= now + CLOSE:
            step, plan, before = self._open.popleft()
            self._commit(plan, before, ends)
            theirs = {m["id"]: m["tokens"] for m in step["members"] if m["tokens"]}
            pairs = {
                "preempted": (sorted(seq.id for seq in plan.preempted), sorted(step.get("displaced", ()))),
                "joined": (sorted(seq.id for seq in plan.joined), sorted(step["joined"])),
                "computed": ({seq.id: n for seq, n in zip(plan.sequences, plan.counts)}, theirs),
            }
            other = [f"{what} {here} here, {there} in vLLM" for what, (here, there) in pairs.items() if here != there]
            self._same += pairs["computed"][0] == theirs
            self._same_joins += pairs["joined"][0] == pairs["joined"][1]
            if other and not self._first:
                why = "; vLLM did not follow its own plan" * ("planned" in step)
                blocked = f"others wait because of {plan.blocked_by} here, {step.get('blocked_by')} in vLLM"
                self._first = f"; first in step {step['n']}: {'; '.join([*other, blocked])}{why}"

    def _commit(self, plan: Plan, before: dict[Sequence, int], now: float) -> None:
        """Give rows their tokens; since the step was planned, some may have left or lost their slots."""
        due = {seq: before[seq] + n >= seq.length for seq, n in zip(plan.sequences, plan.counts)}
        for seq in plan.sequences:
            if seq.state == "waiting" and due[seq]:
                seq.output_ids.append(seq.sampling)
        plan.pause([seq for seq in plan.sequences if seq.state != "running"])
        plan.paused = [seq for seq in plan.paused if seq.state == "running"]
        plan.held = [seq for seq in plan.held if seq.state == "held"]
        for seq in plan.sequences:
            seq.computed = before[seq]
        if plan.sequences or plan.held:
            self._scheduler.commit(plan, [seq.sampling if due[seq] else None for seq in plan.sequences], now)
        for seq in plan.sequences:
            if seq.state == "running":
                seq.computed = min(self._planned[seq], seq.length - 1)
