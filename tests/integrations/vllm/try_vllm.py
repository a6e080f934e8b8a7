"""Run with vLLM's Python, in the root: hold the policies in vLLM's scheduler to laws, on the cases of `./eb vllm check`.

Prints a line for each policy, and the smallest case in which a law is broken: all blocks come back, every request that was not
aborted has its whole answer, no request is preempted again before any token, and no hook or book fails.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from integrations.vllm import check
from integrations.vllm.check import Trial, broken_by
from integrations.vllm.scheduler import PolicyScheduler
from simulate.laws.cases import describe, make_cases
from simulate.laws.laws import Broken
from simulate.laws.shrink import Shrinker

POLICIES = ("dynamic", "static", "elastic", "nobatch", "chunked", "prefill-first", "baton", "econoserve", "tgi", "lightllm",
            *(f"dynamic+{order}" for order in ("sjf", "edf", "vtc", "drr", "lpm", "srpt", "mlfq", "priority", "prefix-tree")))  # fmt: skip


class PolicyTrial(Trial):
    """A case in which the policy decides who joins."""

    def run(self) -> None:
        super().run()
        if self._scheduler.faults or self._scheduler.plans is None:
            raise Broken("no hook or book fails", str(dict(self._scheduler.faults)))

    def _check_work(self, *given: Any) -> None:
        """A policy may leave slots idle."""

    def _check_order(self, *given: Any) -> None:
        """A policy may let requests overtake."""


def main(cases: int) -> int:
    """Return how many policies break a law, with vLLM's steps one by one or planned ahead."""
    logging.disable(logging.WARNING)
    failures = 0
    for policy in POLICIES:
        os.environ["EB_VLLM"] = json.dumps({"policy": policy})
        for ahead in (False, True):
            kind = {"cls": PolicyScheduler, "ahead": ahead, "policy": "fcfs", "chunked": True}
            for case in make_cases(cases, 0):
                case = replace(case, drafts=None)
                if broken := broken_by(kind, case):
                    failures += 1
                    law = broken.law
                    again = Shrinker(lambda case: broken_by(kind, case, law), case, broken)  # noqa: B023
                    broken, case = again.run()
                    print(
                        f"{policy}, ahead {ahead}: {broken.law}. {broken.words}",
                        *describe(case),
                        sep="\n  ",
                        flush=True,
                    )
                    break
        print(f"{policy}: {cases:,} cases", flush=True)
    return failures


if __name__ == "__main__":
    with patch.object(check, "Trial", PolicyTrial):
        raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 40))
