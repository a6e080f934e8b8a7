"""Which requests made another one wait, or slowed its tokens: all are served again, each time without one of them.

The time of a request has two parts: until it joins the batch (wait), and from there to its answer (run). For each of them,

    T_i(all) - T_i(i alone) = sum over j of b_ij + r_i        b_ij = T_i(all) - T_i(all but j)

where T_i is simulated and j is in the server at some time with i. The blame b_ij is how much sooner i would be without j
(leave-one-out), and negative if j helped it. The residual r_i is what single requests do not explain. It is positive where
one of several is enough to delay i, so that removing one of them gains nothing, and negative where several are needed,
because each of them then counts in full.

Only the requests of a busy period, in which the engine is never idle, are served again: what earlier ones left in a prefix
cache or in a policy's memory is not part of T_i. This module must not know servers, or how costs are found.
"""

from __future__ import annotations

import collections.abc as abc
import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from costs.cost import Cost, Host
from scheduling.sequence import Sequence
from simulate.best.clairvoyant import Again
from simulate.fleet.instances import serve
from simulate.simulator import Run

PARTS = ("wait_ms", "run_ms")
MOST_REQUESTS = 400  # of a run in which each is left out once
MOST_OTHERS = 100  # that are left out for the sake of one request,
MOST_REPLAYED = 40_000  # but fewer if the runs without each would have more requests than this in all
MOST_CLIENTS = 8  # in a matrix; all further clients share a row and a column
UNNAMED = "unnamed"
LEAST = 0.0005  # milliseconds of blame that are reported


@dataclass(frozen=True)
class Blame:
    """Seconds of each victim in both parts: `took` and `alone` by victim, `by` by victim and culprit.

    `left_out` counts the requests whose blame was not computed, which is part of the residual.
    """

    victims: list[Sequence]
    culprits: list[Sequence]
    took: np.ndarray
    alone: np.ndarray
    by: np.ndarray
    left_out: int

    @property
    def residual(self) -> np.ndarray:
        """The delay that all others together cause a victim, minus the blame of each."""
        return np.asarray(self.took - self.alone - self.by.sum(axis=1))

    def of_request(self, names: abc.Sequence[str]) -> dict[str, Any]:
        """Describe the blame for the only victim in milliseconds, the worst culprit first; `names` has ids by number."""
        others = [
            {"id": names[int(seq.id)], "client": seq.client, **dict(zip(PARTS, _ms(by)))}
            for seq, by in zip(self.culprits, self.by[0])
            if abs(by).max() * 1000 >= LEAST
        ]
        clients = [
            {"client": name, **{part: round(sum(o[part] for o in others if o["client"] == name), 3) for part in PARTS}}
            for name in {other["client"] for other in others}
        ]
        for rows in (others, clients):
            rows.sort(key=lambda row: -sum(row[part] for part in PARTS))
        totals = {}
        for part, took, alone, rest in zip(PARTS, _ms(self.took[0]), _ms(self.alone[0]), _ms(self.residual[0])):
            share = rest / (took - alone) if abs(took - alone) >= LEAST else None
            totals[part] = {"simulated": took, "alone": alone, "residual": rest, "residual_share": share}
        return {**totals, "others": others, "clients": clients, "left_out": self.left_out}

    def by_client(self) -> dict[str, Any]:
        """Return the matrix of clients: by how many milliseconds a request of the row is delayed, on average, by the column."""
        known = Counter(seq.client or UNNAMED for seq in self.victims)
        names = sorted(name for name, _ in known.most_common(MOST_CLIENTS))
        place = {name: k for k, name in enumerate(names)}
        names += ["others"] * any((seq.client or UNNAMED) not in place for seq in self.culprits)

        def belong(sequences: abc.Sequence[Sequence]) -> np.ndarray:
            places = [place.get(seq.client or UNNAMED, len(place)) for seq in sequences]
            return np.equal.outer(np.arange(len(names)), places).astype(float)

        rows = belong(self.victims)
        counts = rows.sum(axis=1)
        rows /= np.maximum(counts, 1)[:, None]
        by = np.einsum("av,vcp,bc->abp", rows, self.by, belong(self.culprits))
        sums = {"simulated": rows @ self.took, "alone": rows @ self.alone, "residual": rows @ self.residual, "by": by}
        matrix = {part: {name: _ms(of[..., k]) for name, of in sums.items()} for k, part in enumerate(PARTS)}
        return {"clients": names, "requests": counts.astype(int).tolist(), **matrix}


def of(
    again: Again,
    cost: Cost,
    host: Host,
    asked: str = "",
    run: Run | None = None,
    progress: Callable[[int], None] = lambda number: None,
) -> Blame:
    """Serve the requests without each of them, and return the blame for all, or for the one with the id `asked`.

    `again` makes a fresh scheduler and all requests; `run` is the run of all of them, if it is known. `progress` is called
    with the number of requests that were left out. A request that a replay does not answer has no blame from it.
    """
    everyone = run or serve(*again(), cost, host)

    def times(ids: Collection[str]) -> dict[str, np.ndarray]:
        """Return the seconds of both parts of each request when these requests are the only ones."""
        served = everyone
        if len(ids) < len(everyone.sequences):
            scheduler, sequences = again()
            served = serve(scheduler, [seq for seq in sequences if seq.id in ids], cost, host)
        return {seq.id: parts_of(seq) for seq in served.done}

    together_in: dict[str, set[str]] = {}  # by request: the ids of its busy period
    took: dict[str, np.ndarray] = {}
    for period in busy_periods(everyone):
        ids = {seq.id for seq in period}
        if not asked or asked in ids:
            together_in |= dict.fromkeys(ids, ids)
            took |= times(ids)
    culprits = [seq for seq in everyone.sequences if seq.id in together_in]
    victims = [seq for seq in culprits if seq.id in took and asked in ("", seq.id)]
    if not victims:
        raise ValueError("no request has an answer in the simulation. Choose another request")
    left_out = 0
    if asked:
        others = nearest(victims[0], culprits)
        most = min(MOST_OTHERS, MOST_REPLAYED // len(together_in[asked]))
        culprits, left_out = others[:most], len(others[most:])
    by = np.zeros((len(victims), len(culprits), len(PARTS)))
    for number, culprit in enumerate(culprits):
        without = times(together_in[culprit.id] - {culprit.id})
        for victim, seq in enumerate(victims):
            # Requests of different periods are never together.
            if seq is not culprit and together(seq, culprit) > 0:
                by[victim, number] = took[seq.id] - without.get(seq.id, took[seq.id])
        progress(number + 1)
    return Blame(
        victims, culprits,
        took=np.array([took[seq.id] for seq in victims]),
        alone=np.array([times({seq.id}).get(seq.id, took[seq.id]) for seq in victims]),
        by=by,
        left_out=left_out,
    )  # fmt: skip


def busy_periods(run: Run) -> list[list[Sequence]]:
    """Return the requests of each time in which some request waited or ran, in order of arrival."""
    periods: list[list[Sequence]] = []
    end = -math.inf
    for seq in run.sequences:
        if seq.arrived_at >= end:
            periods.append([])
        periods[-1].append(seq)
        end = max(end, _left(seq))
    return periods


def nearest(victim: Sequence, period: abc.Sequence[Sequence]) -> list[Sequence]:
    """Return the requests that were in the server together with the victim, the longest together first."""
    others = (seq for seq in period if seq is not victim and together(victim, seq) > 0)
    return sorted(others, key=lambda seq: -together(victim, seq))


def together(a: Sequence, b: Sequence) -> float:
    """Return for how many seconds both were waiting or running; not above 0 if one left before the other arrived."""
    return min(_left(a), _left(b)) - max(a.arrived_at, b.arrived_at)


def _left(seq: Sequence) -> float:
    return seq.arrived_at if seq.finished_at is None else seq.finished_at


def parts_of(seq: Sequence) -> np.ndarray:
    """Return the seconds in which a request waited, and in which it ran."""
    joined = seq.scheduled_at or 0.0
    return np.array([joined - seq.arrived_at, _left(seq) - joined])


def _ms(seconds: np.ndarray) -> list[Any]:
    milliseconds: list[Any] = (np.round(1000 * seconds, 3) + 0.0).tolist()  # without negative zeros
    return milliseconds
