"""What learned lengths bring on a real model's chats, and what they cost when prompts change their meaning.

There are 324 messages, which repeat if there are more requests. Three drifts try to make predictions harmful: long and
short answers trade places halfway, or every hundred requests, or lengths are independent of prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from statistics import mean

import pytest

from client.workloads import catalog, corpus, messages
from client.workloads.arrivals import Arrivals
from costs.published import MODELS
from scheduling.sequence import Sequence
from simulate.simulator import simulate
from tests.support import ROOT
from tests.support.scheduling import make_scheduler

KNOWN = json.loads((ROOT / "dev/benchmarks/results/chats-smollm2.json").read_text())
COUNT = 972
DRIFTS: dict[str, Callable[[int], bool]] = {  # whether a request is turned round
    "none": lambda i: False,
    "middle": lambda i: i >= COUNT // 2,
    "hundreds": lambda i: i // 100 % 2 == 1,
    "no pattern": lambda i: False,
}


def requests(rate: float, seed: int, drift: str = "none") -> list[Sequence]:
    """Return the chats of one seed, at `rate` a second, with the answers that they had, changed by a drift."""
    known = dict(zip(messages.openings(), KNOWN["lengths"]))
    plan = catalog.draw("chat", COUNT, Arrivals("poisson", rate), seed, corpus.load())
    real = [known[planned.prompt] for planned in plan.planned]
    if drift == "no pattern":
        random.Random(seed).shuffle(real)
    places = sorted(range(COUNT), key=real.__getitem__)
    turned = {i: real[j] for i, j in zip(places, reversed(places))}
    numbers: dict[str, int] = {}
    sequences = []
    for i, planned in enumerate(plan.planned):
        ids = [numbers.setdefault(token, len(numbers)) for token in corpus.split(planned.prompt)]
        sequences.append(Sequence(ids, KNOWN["limit"], id=str(i), arrived_at=planned.at))
        sequences[-1].end_after(turned[i] if DRIFTS[drift](i) else real[i])
    return sequences


def latencies(name: str, sequences: list[Sequence], **options: str) -> list[float]:
    run = simulate(make_scheduler(name, 8, budget=2048, **options), sequences, MODELS["oracle-a"])
    return [(seq.finished_at or 0.0) - seq.arrived_at for seq in run.sequences]


@pytest.mark.full
@pytest.mark.parametrize(
    ("drift", "least_gain"), [("none", 0.5), ("middle", 0.3), ("hundreds", -1.0), ("no pattern", -1.0)]
)
def test_learned_lengths_gain_half_of_what_the_truth_does_and_lose_little_when_they_are_wrong(
    drift: str, least_gain: float
) -> None:
    burst = requests(1.0, 0)
    for seq in burst:
        seq.arrived_at = 0.0
    rate = 0.9 * COUNT / max(latencies("dynamic", burst))  # of what is served when all come at once
    means: dict[str, list[float]] = {
        predictor: [
            mean(latencies("dynamic+sjf" if predictor else "dynamic", requests(rate, seed, drift), **options))
            for seed in (100, 101)
        ]
        for predictor, options in (
            ("", {}), ("oracle", {"predictor": "oracle"}), ("learned", {"predictor": "learned"})
        )
    }  # fmt: skip
    first, oracle, learned = map(mean, means.values())
    assert (first - learned) / (first - oracle) > least_gain
    assert max(b / a for a, b in zip(means[""], means["learned"])) < 1.02
