"""`./eb vllm check`: hold vLLM's own scheduler to laws that the policies of this project keep, in vLLM's environment.

Each kind of scheduler serves the small random cases of `./eb simulate check` without a model. The smallest case found that
breaks a law is printed. No policy of this project takes part.
"""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from itertools import product
from typing import Any

from integrations.vllm.serve import vllm_version
from scheduling.located import described
from scheduling.pages import pages_for
from simulate.laws import laws, overtaking
from simulate.laws.case import Case
from simulate.laws.cases import describe, make_cases
from simulate.laws.laws import Broken
from simulate.laws.shrink import Shrinker

CASES = 200
SIZE = 4  # tokens of a block in cases with as many blocks as they need


def main(argv: list[str]) -> None:
    """Print what each kind of scheduler keeps or breaks; exit with 1 if one breaks a law."""
    parser = argparse.ArgumentParser("./eb vllm check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--cases", type=int, default=CASES, help=f"cases for each kind of scheduler (default {CASES})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default 0)")
    args = parser.parse_args(argv)
    try:
        if args.cases < 1:
            raise ValueError(f"--cases is {args.cases}, but must be at least 1. Use {CASES}")
        found_version = vllm_version()
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    logging.disable(logging.WARNING)  # one for each case
    print(f"vLLM {found_version}, {args.cases:,} cases for each scheduler, seed {args.seed}", flush=True)  # noqa: T201
    breaks = False
    for ahead, policy, chunked in product((False, True), ("fcfs", "priority"), (True, False)):
        cls = AsyncScheduler if ahead else Scheduler
        kind = {"cls": cls, "ahead": ahead, "policy": policy, "chunked": chunked}
        found: dict[str, list[tuple[Broken, Case]]] = {}
        for case in make_cases(args.cases, args.seed):
            if broken := broken_by(kind, case := replace(case, drafts=None, margin=1)):
                found.setdefault(broken.law, []).append((broken, case))
        name = f"{cls.__name__}, {policy}, chunked prefill {'on' if chunked else 'off'}"
        print(f"{name}: {'breaks' if found else 'keeps'} the laws", flush=True)  # noqa: T201
        for law, some in found.items():
            breaks, (broken, case) = True, Shrinker(lambda case: broken_by(kind, case, law), *some[0][::-1]).run()  # noqa: B023
            print(f"  {law}, in {len(some):,} cases. {broken.words}, in the smallest:")  # noqa: T201
            print("\n".join(f"  {line}" for line in describe(case)), flush=True)  # noqa: T201
    sys.exit(breaks)


def broken_by(kind: dict[str, Any], case: Case, law: str = "") -> Broken | None:
    """Serve a case; return the law that is broken first, if any, or if it is this one."""
    try:
        Trial(kind, case).run()
    except Exception as error:
        broken = error if isinstance(error, Broken) else Broken("no crash", described(error))
        return broken if law in ("", broken.law) else None
    return None


class Trial:
    """A case on its way through vLLM's scheduler; its time is that of the cases."""

    def __init__(self, kind: dict[str, Any], case: Case) -> None:
        from integrations.vllm.mocked_vllm import CONTEXT, Mocked

        totals = [len(r.prompt) + r.output for r in case.requests]
        # vLLM refuses to start with fewer tokens than rows, or, if it must not cut prompts, than a whole request has.
        least = max(case.slots, *([] if kind["chunked"] else totals), 1)
        blocks, self._size = case.pages or (1 + sum(pages_for(total, SIZE) for total in totals), SIZE)
        self._case, self._kind, self._tokens = case, kind, max(least, min(case.budget, CONTEXT))
        sizes: dict[str, Any] = {"slots": case.slots, "tokens": self._tokens, "blocks": blocks, "size": self._size}
        self.mocked = Mocked(**sizes, caching=case.prefix_cache, **kind)
        self._scheduler = self.mocked.scheduler
        self._coming = sorted(enumerate(case.requests), key=lambda item: item[1].arrival)
        self._places = {f"r{i}": place for place, (i, _) in enumerate(self._coming)}
        self._joined: set[str] = set()  # at least once
        self._preempted: dict[str, int] = {}  # and how many tokens there were then
        self._generated = 0

    def run(self) -> None:
        """Serve all requests; raise Broken when a law is broken."""
        case, mocked, coming, now = self._case, self.mocked, self._coming, 0
        free, cancels, cancelled = mocked.free, dict(case.cancels), set[str]()
        limit = 2000 + 2 * sum(len(r.prompt) + r.output for r in case.requests)
        for number in range(limit):
            now = max(now, coming[0][1].arrival) if mocked.is_over and coming else now
            while coming and coming[0][1].arrival <= now:
                i, r = coming.pop(0)
                more = {"priority": r.priority, "arrival_time": r.arrival, "extra": {"client": r.client}}
                mocked.add(f"r{i}", list(r.prompt), r.output, **more)
            if number in cancels and (inside := list(self._scheduler.requests)):
                cancelled.add(id := inside[cancels[number] % len(inside)])
                mocked.abort(id)
            if mocked.is_over and not coming:
                break
            now += self._step()
        else:
            raise Broken("no request starves", f"unfinished after {limit} steps: {', '.join(self._scheduler.requests)}")
        for i, r in enumerate(case.requests):
            if (id := f"r{i}") not in cancelled and (mocked.ended.get(id), mocked.tokens[id]) != ("length", r.output):
                words = f"{id} has {mocked.tokens[id]} of {r.output} tokens, and ends with {mocked.ended.get(id)}"
                raise Broken("no request is lost", words)
        if mocked.free != free:
            raise Broken(laws.LEAK, f"{free - mocked.free} of {free} blocks do not come back")

    def _step(self) -> int:
        """Plan a step, hold it to the laws, and compute it; return the time that it takes."""
        ran = {one.request_id for one in self._scheduler.running}
        decoding = {id for id in ran if self._scheduler.requests[id].num_output_tokens}
        output, due = self.mocked.plan()
        counts, preempted = output.num_scheduled_tokens, output.preempted_req_ids or ()
        self._check_work(sum(counts.values()), ", in a step that preempts" if preempted else "")
        self._check_order([one for one in self._scheduler.running if one.request_id not in ran])
        for id in preempted:
            if self._preempted.get(id) == self._generated:
                raise Broken(laws.PROGRESS, f"{id} is preempted again before any request has generated a token")
            self._preempted[id] = self._generated
        self._generated += len(due)
        self.mocked.compute()
        return 10 + sum(2 if id in decoding else int(count) for id, count in counts.items())

    def _check_work(self, tokens: int, when: str) -> None:
        """No slot stays empty while the first request that waits fits, without any block that it could share."""
        slots, left, free = self._case.slots - len(self._scheduler.running), self._tokens - tokens, self.mocked.free
        if slots and self._scheduler.waiting:
            first = self._scheduler.waiting.peek_request()
            needed = pages_for(first.num_tokens, self._size)
            if needed <= free and left >= (1 if self._kind["chunked"] else first.num_tokens):
                words = f"{first.request_id} waits for {needed} blocks, with {slots} slots, {left} tokens and {free} blocks left"
                raise Broken(laws.WORK + when, words)

    def _check_order(self, joined: list[Any]) -> None:
        """No request passes one that waits and comes before it; what was preempted has passed the others before."""
        is_urgent = self._kind["policy"] == "priority"
        for one, other in product(joined, list(self._scheduler.waiting)):
            is_earlier = self._places[other.request_id] < self._places[one.request_id]
            if other < one if is_urgent else is_earlier and one.request_id not in self._joined:
                raise Broken(overtaking.LAW, f"{one.request_id} joins while {other.request_id} waits")
        self._joined.update(one.request_id for one in joined)
