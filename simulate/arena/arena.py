"""The arena: every policy serves the same requests of many workloads, and is compared with one of them pair by pair.

A round is a workload with a seed. Its rate is a share of what `dynamic` serves when all requests are there at once, so that
workloads of long and of short requests are loaded alike. This module must not know command lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # Student's t; scipy.stats takes a second longer to load

import policies
from costs import published
from scheduling.located import failure
from scheduling.scheduler import Scheduler
from simulate import workloads
from simulate.arena.measures import Measures, measure
from simulate.scenario import Chosen, EngineSize
from simulate.simulator import PolicyHangs, simulate

REFERENCE = "dynamic"
WORKLOADS = (
    "original", "original-code", "clipped-normal", "uniform", "short-long", "anyscale", "orca", "fastgen", "shared-prefix",
    "drawn-turns",
)  # fmt: skip
CLIENTS, PRIORITIES = 4, 3
PATIENCE = (1.0, 4.0)  # deadlines, as multiples of the time that a request takes in a full batch
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rules:
    """The machine and the load of all rounds."""

    cost: str = "vtc-a10g"
    slots: int = 16
    kv_tokens: int = 32768
    num: int = 500
    load: float = 1.0

    def scheduler(self, policy: str) -> Scheduler:
        return EngineSize(self.slots, kv_tokens=self.kv_tokens).scheduler(Chosen(policy))


def play(names: Sequence[str], rules: Rules, workload: str, seed: int) -> tuple[dict[str, Measures], float]:
    """Return the figures of each policy in one round, and the processor time that the round took in seconds.

    RuntimeError for a policy that fails.
    """
    began = time.process_time()
    cost, host = published.make(rules.cost), published.host_of(rules.cost)
    unit = workloads.draw(workload, 1.0, rules.num, seed)
    calls = unit.calls and [call._replace(tool_s=0.0) for call in unit.calls]  # tools would leave the machine idle
    at_once = replace(unit, at=np.zeros(len(unit.at)), calls=calls)
    flood = simulate(rules.scheduler(REFERENCE), at_once.sequences(), cost, host)
    capacity = rules.num / flood.makespan
    patience = [times * rules.slots / capacity for times in PATIENCE]
    rows = unit.faster(rules.load * capacity).hinted(seed, CLIENTS, PRIORITIES, patience)
    found = {}
    for name in names:
        scheduler = rules.scheduler(name)
        try:
            found[name] = measure(simulate(scheduler, rows.sequences(), cost, host))
        except PolicyHangs:
            raise
        except Exception as error:  # a user's policy may raise anything
            crash = failure(error, scheduler.policy)
            raise RuntimeError(f"{name}: {crash}. Run ./eb simulate check {name}") from error
    return found, time.process_time() - began


class Paired(NamedTuple):
    """The mean of paired differences, and half the width of its 95 % interval (None where nothing was repeated)."""

    mean: float
    half: float | None


class Standing(NamedTuple):
    """A policy's figures: means over all rounds, and their comparison with the reference.

    `beside` holds logarithms of ratios, of `misses` differences.
    """

    policy: str
    mean: Measures
    beside: dict[str, Paired]


def paired(groups: Iterable[Sequence[float]]) -> Paired:
    """Return the mean of the groups' means, and its interval for other seeds of the same workloads (stratified Student)."""
    groups = [list(group) for group in groups]
    freedom = sum(len(group) - 1 for group in groups)
    mean = fmean(fmean(group) for group in groups)
    if min(map(len, groups)) < 2:
        return Paired(mean, None)
    error = math.sqrt(sum(variance(group) / len(group) for group in groups)) / len(groups)
    return Paired(mean, float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error)


def rank(rounds: Mapping[tuple[str, int], Mapping[str, Measures]], by: str) -> list[Standing]:
    """Return the policies by a figure beside the reference's, the best first; rounds are by workload and seed."""
    names = dict.fromkeys(name for found in rounds.values() for name in found)
    standings = []
    for name in names:
        mean = Measures(*(fmean(found[name][k] for found in rounds.values()) for k in range(len(Measures._fields))))
        beside = {
            field: paired(
                [_beside(found, name, k) for (other, _), found in rounds.items() if other == workload]
                for workload in dict.fromkeys(workload for workload, _ in rounds)
            )
            for k, field in enumerate(Measures._fields)
        }
        standings.append(Standing(name, mean, beside))
    return sorted(standings, key=lambda standing: standing.beside[by].mean)


def never_best(rounds: Mapping[tuple[str, int], Mapping[str, Measures]]) -> list[str]:
    """Return the policies that have the least of no figure on any workload; those that tie for it are not among them."""
    found: set[str] = set()
    for workload in dict.fromkeys(workload for workload, _ in rounds):
        own = {key: played for key, played in rounds.items() if key[0] == workload}
        for field in Measures._fields:
            ranking = rank(own, field)
            least = ranking[0].beside[field].mean
            found |= {standing.policy for standing in ranking if standing.beside[field].mean == least}
    names = dict.fromkeys(name for played in rounds.values() for name in played)
    return sorted(names.keys() - found)


def _beside(found: Mapping[str, Measures], name: str, k: int) -> float:
    """Return a figure relative to the reference's in the same round."""
    mine, other = found[name][k], found[REFERENCE][k]
    return mine - other if Measures._fields[k] == "misses" else math.log(mine / other)


def everyone() -> list[str]:
    """Return all loops, and dynamic with every order, but those by program: most workloads have none."""
    orders = [f"{REFERENCE}+{order}" for order in policies.order_names() if order != "fcfs"]
    names = [*policies.names(), *orders]
    return [name for name in names if "program" not in policies.get_policy(name).claims.uses]
