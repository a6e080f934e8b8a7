"""Run with vLLM's Python, in the root: try vLLM's own scheduler and the policies in it on random requests, without a model.

Each case has aborts, shared prefixes and few blocks. Prints a line for each scheduler, and the smallest case of one that breaks a
law: all blocks come back, every request that was not aborted is answered within 5,000 steps, and no hook or book fails.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

from engines.mocked_vllm import Mocked

POLICIES = ("dynamic", "static", "elastic", "nobatch", "chunked", "prefill-first", "baton", "econoserve", "tgi", "lightllm",
            *(f"dynamic+{order}" for order in ("sjf", "edf", "vtc", "drr", "lpm", "srpt", "mlfq", "priority", "prefix-tree", "rpm")))  # fmt: skip


def requests(seed: int) -> list[tuple[list[int], int, bool, int]]:
    """Return a prompt, the length of the answer, whether it is aborted, and the steps until the next one."""
    rng = random.Random(seed)
    heads = [[rng.randrange(9) for _ in range(40)] for _ in range(2)]
    return [
        (rng.choice(heads)[: rng.randrange(1, 41)] + [rng.randrange(9) for _ in range(rng.randrange(60))], rng.randrange(1, 60),
         rng.random() < 0.15, rng.choice((0, 0, 1, 5)))
        for _ in range(30)
    ]  # fmt: skip


def step(mocked: Mocked) -> None:
    mocked.plan()
    mocked.compute()


def broken(cls: type[Any], given: list[tuple[list[int], int, bool, int]], **sizes: Any) -> str:
    """Serve requests; return which law is broken, or nothing."""
    mocked = Mocked(cls, **sizes)
    free, aborted = mocked.free, set()
    for i, (prompt, tokens, leaves, pause) in enumerate(given):
        mocked.add(f"r{i}", prompt, tokens, extra={"client": "ab"[i % 2]})
        for _ in range(pause):
            step(mocked)
        if leaves:
            aborted.add(f"r{i // 2}")
            mocked.abort(f"r{i // 2}")
    steps = 0
    while not mocked.is_over and steps < 5000:
        step(mocked)
        steps += 1
    if steps == 5000:
        return "no request is lost: some are not answered after 5,000 steps"
    if missing := {f"r{i}" for i in range(len(given))} - aborted - set(mocked.ended):
        return f"no request is lost: {sorted(missing)} have no answer"
    if mocked.free != free:
        return f"no page is leaked: {free - mocked.free} blocks do not come back"
    faults = getattr(mocked.scheduler, "faults", None)
    return (
        f"a hook or the books failed: {dict(faults)}" if faults or getattr(mocked.scheduler, "plans", 1) is None else ""
    )


def smallest(cls: type[Any], given: list[Any], law: str, **sizes: Any) -> list[Any]:
    """Leave requests out as long as the same law is broken."""
    i = 0
    while i < len(given):
        rest = given[:i] + given[i + 1 :]
        if rest and broken(cls, rest, **sizes).partition(":")[0] == law.partition(":")[0]:
            given = rest
        else:
            i += 1
    return given


def main(seeds: int) -> int:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from engines.vllm import PolicyScheduler

    failures = 0
    for name, cls in (
        ("vLLM", Scheduler),
        ("vLLM, asynchronous", AsyncScheduler),
        *((policy, PolicyScheduler) for policy in POLICIES),
    ):
        os.environ["EB_VLLM"] = json.dumps({"policy": name})
        cases = [(seed, ahead) for seed in range(seeds) for ahead in (False, True) if cls is not Scheduler or not ahead]
        found = ""
        for seed, ahead in cases:
            sizes: dict[str, Any] = {
                "slots": 1 + seed % 5,
                "tokens": (16, 64, 512)[seed % 3],
                "blocks": (12, 20, 64)[seed % 3],
                "ahead": ahead,
            }
            if found := broken(cls, requests(seed), **sizes):
                case = smallest(cls, requests(seed), found, **sizes)
                found = f"{found}\n  seed {seed}, {sizes}, smallest: {[(len(p), *rest) for p, *rest in case]}"
                break
        failures += bool(found)
        print(f"{name}: {found or f'keeps the laws in {len(cases)} cases'}", flush=True)
    return failures


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 6))
