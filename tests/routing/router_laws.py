"""What every router must keep, tested on random fleets whose replicas come, go and fill up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random

from routing.routers import Replicas, Router, RoutingKey

STEPS = 150  # requests of one case


def broken_law(make: Callable[[Random], Router], seed: int, *, bounded: bool = False) -> str | None:
    """Return the law that a router breaks in the case of this seed, in words; None if it keeps all.

    `bounded`: its first choice has a load of at most `Replicas.most`.
    """
    first, again = (_Case(make, seed, bounded) for _ in range(2))
    broken = first.run()
    again.run()
    if broken is None and first.chosen != again.chosen:
        return "repeatable: the same random numbers gave another choice"
    return broken


class _Case:
    """A fleet on which requests arrive one after the other, finish at random, and replicas are replaced."""

    def __init__(self, make: Callable[[Random], Router], seed: int, bounded: bool) -> None:
        self.route = make(Random(seed))
        self.rng = Random(seed + 1)
        self.bounded = bounded
        self.born = 0
        self.loads: dict[str, int] = {}
        self.chosen: list[str] = []
        for _ in range(self.rng.randint(1, 9)):
            self.start()

    def start(self) -> None:
        self.loads[f"replica-{self.born}"] = 0
        self.born += 1

    def run(self) -> str | None:
        for _ in range(STEPS):
            self.change()
            broken = self.ask()
            if broken:
                return broken
        return self.starved()

    def change(self) -> None:
        """Now and then let a replica leave or come, or requests finish, many at once so that loads differ."""
        if self.rng.random() < 0.02 and len(self.loads) > 1:
            del self.loads[self.rng.choice([*self.loads])]
        if self.rng.random() < 0.02:
            self.start()
        if self.rng.random() < 0.05:
            for name, load in self.loads.items():
                self.loads[name] = self.rng.randint(0, load)

    def ask(self) -> str | None:
        names = [*self.loads]
        load = [self.loads[name] for name in names]
        free = [self.rng.random() for _ in names]
        replicas = Replicas(names, load, free, [self.rng.randint(0, 999) for _ in names])
        before = copy.deepcopy(replicas)
        prompt = self.rng.randint(0, 5)
        key = RoutingKey(range(10 * prompt, 10 * prompt + self.rng.randint(0, 3)), self.rng.choice(["", "a", "b", "c"]))
        order = list(self.route(replicas, key))
        if replicas != before:
            return "purity: it changed the facts that it was given"
        if sorted(order) != list(range(len(names))):
            return f"each replica once: it yielded {order} for {len(names)} replicas"
        if self.bounded and load[order[0]] > replicas.most:
            return f"bounded imbalance: a load of {load[order[0]]} was chosen, {replicas.most:g} is the most"
        self.loads[names[order[0]]] += 1
        self.chosen.append(names[order[0]])
        return None

    def starved(self) -> str | None:
        """Send requests that stay, each another prompt, until the mean load is 30: every replica must get some."""
        for name in self.loads:
            self.loads[name] = 0
        names = [*self.loads]
        for k in range(30 * len(names)):
            replicas = Replicas(names, [*self.loads.values()])
            i = next(iter(self.route(replicas, RoutingKey([1000 + k], f"session-{k}"))))
            self.loads[names[i]] += 1
            self.chosen.append(names[i])
        idle = [name for name, load in self.loads.items() if not load]
        return f"no replica starves: {idle[0]} got none of {30 * len(names)} requests" if idle else None
