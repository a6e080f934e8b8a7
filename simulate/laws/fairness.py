"""The law that backlogged clients get equal service, checked against the bound of VTC's theorem (OSDI 2024)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from scheduling.iteration import Plan
from scheduling.policy import Policy
from scheduling.scheduler import Output, Scheduler, TokenRun
from scheduling.sequence import Sequence
from simulate.laws.case import Case
from simulate.laws.laws import Broken

LAW = "fair between clients"


class Service:
    """The service of each client so far, at the policy's own prices, and who was backlogged after each step."""

    def __init__(self, policy: Policy) -> None:
        # The price of a request with this many prompt and generated tokens, and the weight of a client.
        self._price: Callable[[int, float], float]
        self._price = getattr(policy, "price", lambda prompt, output: prompt + 2.0 * output)
        self._weight: Callable[[str], float] = getattr(policy, "weight", lambda client: 1.0)
        self._joining: Callable[[Sequence], float]  # the price of what a request computes of its prompt
        self._joining = getattr(policy, "price_of_joining", lambda seq: self._price(len(seq.prompt_ids), 0))
        self._within = policy.claims.fair_within
        self._service: dict[str, float] = {}
        self._steps: list[tuple[set[str], dict[str, float]]] = []

    def add(self, scheduler: Scheduler, plan: Plan, outputs: list[Output]) -> None:
        """Add the service of a step that is not committed yet."""
        price = self._price
        for seq in plan.joined:
            if not seq.preemptions:
                self._charge(seq.client, self._joining(seq))
        for seq, output in zip(plan.sequences, outputs):
            if output is not None:
                prompt, before = len(seq.prompt_ids), len(seq.output_ids)
                tokens = len(output.ids) if isinstance(output, TokenRun) else 1
                self._charge(seq.client, price(prompt, before + tokens) - price(prompt, before))
        self._steps.append(({seq.client for seq in scheduler.waiting}, dict(self._service)))

    def _charge(self, client: str, price: float) -> None:
        self._service[client] = self._service.get(client, 0.0) + price / self._weight(client)

    def _bound(self, case: Case) -> float:
        """Return the largest gap between two counters: twice one prompt, what a full batch generates, and a quantum."""
        price = self._price
        shapes = [(len(r.prompt), r.output, self._weight(r.client)) for r in case.requests]
        joining = max(price(p, 0) / w for p, _, w in shapes)
        generating = max((price(p, n) - price(p, 0)) / w for p, n, w in shapes)
        return 2 * (joining + case.slots * generating + self._within) + 1e-6

    def check(self, case: Case) -> None:
        """Raise Broken if two clients got unequal service while both had requests waiting."""
        bound = self._bound(case)
        for a, b in itertools.combinations(sorted(self._service), 2):
            marked = [({a, b} <= clients, service) for clients, service in self._steps]
            for both, steps in itertools.groupby(marked, key=lambda step: step[0]):
                gaps = [service.get(a, 0.0) - service.get(b, 0.0) for _, service in steps]
                if both and max(gaps) - min(gaps) > bound:
                    raise Broken(
                        LAW,
                        f"{a} and {b} both had requests waiting, and one got "
                        f"{max(gaps) - min(gaps):g} more service than the other; the limit is {bound:g}",
                    )
