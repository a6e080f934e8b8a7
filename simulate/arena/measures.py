"""The four figures that judge a run in the arena and in lessons; less is better.

Without numpy, because the page in the browser has none. This module must not know policies or where requests come from.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, quantiles
from typing import NamedTuple

from scheduling.sequence import Sequence
from simulate.simulator import Run


class Measures(NamedTuple):
    """Seconds from arrival to the end of the answer, or of a whole program, mean and p99; the wait of light clients; the share of deadlines missed.

    A light client asks for less than an equal share of the tokens. Fair loops do not let it wait for the heavy ones: `light`
    is the mean time to the first token of the light clients' requests, as a multiple of that of all. A request that was
    refused counts as answered at the end of the run.
    """

    mean: float
    p99: float
    light: float
    misses: float


def measure(run: Run) -> Measures:
    """Return the figures of a run of at least two requests; without light clients `light` is 1, without deadlines `misses` is 0."""
    before, after = run.host.alpha0, run.host.alpha1
    latencies, waits, late = [], {}, 0
    for seq in run.sequences:
        answered = seq.finish_reason in ("length", "stop")
        ended = (seq.finished_at if answered and seq.finished_at is not None else run.ended) + after
        latencies.append(ended - seq.arrived_at + before)
        waits[seq] = (ended if seq.first_token_at is None else seq.first_token_at) - seq.arrived_at + before
        late += seq.deadline is not None and (not answered or ended > seq.deadline)
    if run.loop is not None:
        latencies = [*run.loop.times(after).values()]
    light = _light(run.sequences)
    timed = sum(seq.deadline is not None for seq in run.sequences)
    return Measures(
        fmean(latencies),
        quantiles(latencies, n=100, method="inclusive")[98],  # as numpy's percentile
        fmean(waits[seq] for seq in light) / fmean(waits.values()) if light else 1.0,
        late / timed if timed else 0.0,
    )


def _light(sequences: list[Sequence]) -> list[Sequence]:
    """Return the requests of the clients that ask for less than an equal share of all tokens."""
    asked: dict[str, int] = defaultdict(int)
    for seq in sequences:
        asked[seq.client] += seq.total
    share = sum(asked.values()) / len(asked)
    return [seq for seq in sequences if asked[seq.client] < share]
