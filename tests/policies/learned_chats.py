"""The chats of the client with a model's answer lengths, served by simulation with predicted lengths.

There are 324 messages, which repeat if there are more requests. Three drifts try to make predictions harmful: long and
short answers trade places halfway, or every hundred requests, or lengths are independent of prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from client.workloads import catalog, corpus, messages
from client.workloads.arrivals import Arrivals
from costs.published import MODELS
from policies import get_policy
from policies.orders._predictions import Predicting
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import simulate

LENGTHS = Path(__file__).parents[2] / "dev/benchmarks/results" / "chats-smollm2.json"
COST, SLOTS, WINDOWS = MODELS["oracle-a"], 8, 12
Pairs = list[tuple[float, int]]  # predicted and real lengths
DRIFTS: dict[str, Callable[[int, int], bool]] = {  # whether a request of so many is turned round
    "none": lambda i, n: False,
    "middle": lambda i, n: i >= n // 2,
    "hundreds": lambda i, n: i // 100 % 2 == 1,
    "no pattern": lambda i, n: False,
}


def requests(lengths: list[int], limit: int, count: int, rate: float, seed: int, drift: str = "none") -> list[Sequence]:
    """Return the chats of one seed, at `rate` a second, with the answers that they had, changed by a drift."""
    known = dict(zip(messages.openings(), lengths))
    plan = catalog.draw("chat", count, Arrivals("poisson", rate), seed, corpus.load())
    real = [known[planned.prompt] for planned in plan.planned]
    if drift == "no pattern":
        random.Random(seed).shuffle(real)
    places = sorted(range(count), key=real.__getitem__)
    turned = {i: real[j] for i, j in zip(places, reversed(places))}
    numbers: dict[str, int] = {}
    sequences = []
    for i, planned in enumerate(plan.planned):
        ids = [numbers.setdefault(token, len(numbers)) for token in corpus.split(planned.prompt)]
        sequences.append(Sequence(ids, limit, id=str(i), arrived_at=planned.at))
        sequences[-1].end_after(turned[i] if DRIFTS[drift](i, count) else real[i])
    return sequences


def serve(name: str, sequences: list[Sequence], **options: str) -> tuple[dict[str, float], Pairs]:
    """Return the latency of each request under a policy, and what it predicted, by arrival."""
    policy = get_policy(name, SLOTS, options)
    pairs: dict[str, tuple[float, int]] = {}
    if isinstance(policy, Predicting):
        guess = policy.predict

        def predict(seq: Sequence) -> float:
            pairs.setdefault(seq.id, (guess(seq), seq.answer_tokens or seq.max_tokens))
            return guess(seq)

        policy.predict = predict  # type: ignore[method-assign]
    run = simulate(Scheduler(policy), sequences, COST)
    latency = {seq.id: (seq.finished_at or 0.0) - seq.arrived_at for seq in run.sequences}
    return latency, [pairs[str(i)] for i in range(len(pairs))]


def accuracy(pairs: Pairs) -> float:
    """Return the share of pairs of unequal answers that are predicted in the right order; an equal prediction is half."""
    right = [0.5 if a == b else float((a < b) == (x < y)) for (a, x), (b, y) in combinations(pairs, 2) if x != y]
    return mean(right) if right else 0.5


def capacity(lengths: list[int], limit: int, count: int) -> float:
    """Return the requests per second that `dynamic` serves when all come at once."""
    burst = requests(lengths, limit, count, 1.0, 0)
    for seq in burst:
        seq.arrived_at = 0.0
    return count / max(serve("dynamic", burst)[0].values())


def compare(name: str, draw: Callable[[], list[Sequence]]) -> dict[str, Any]:
    """Return the mean latencies, of all requests and of the second half, and how well predictions ranked them."""
    runs = {"first come": serve("dynamic", draw())} | {
        predictor: serve(name, draw(), predictor=predictor) for predictor in ("oracle", "learned")
    }
    pairs = runs["learned"][1]
    edges = [round(k * len(pairs) / WINDOWS) for k in range(WINDOWS + 1)]
    return {
        **{key: mean(latency.values()) for key, (latency, _) in runs.items()},
        **{f"{key}, 2nd half": mean(latency[str(i)] for i in range(edges[WINDOWS // 2], len(pairs)))
           for key, (latency, _) in runs.items()},
        "accuracy": accuracy(pairs),
        "accuracies": [accuracy(pairs[a:b]) for a, b in pairwise(edges)],
    }  # fmt: skip


def summary(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of runs, the gains, and by how much the worst run is slower than first come, first served."""
    row = {key: mean(one[key] for one in every) for key in every[0] if key != "accuracies"}
    for half in ("", ", 2nd half"):
        first, oracle, learned = (row[f"{key}{half}"] for key in ("first come", "oracle", "learned"))
        row[f"gain{half}"] = (first - learned) / (first - oracle)
    row["worst"] = max(one["learned"] / one["first come"] - 1 for one in every)
    return row | {"accuracies": [mean(column) for column in zip(*(one["accuracies"] for one in every))]}
