"""Measure what learned lengths gain: the mean latency, where first come, first served is 0 and the true lengths are 1.

    python -m benchmarks.learned --json benchmarks/results/learned.json

The requests are the chats of the client (`--workload chat`), simulated with the lengths of a model's answers (--lengths).
There are 324 messages, which repeat if there are more requests. The rate is --load times what `dynamic` serves when all
arrive at once. Three drifts try to make predictions harmful: long and short answers trade places halfway, or every hundred
requests, or lengths are independent of prompts. The figures are means over --seeds, of which some were used to choose
constants. They are the same on every machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import report
from client.workloads import catalog, corpus, messages
from client.workloads.arrivals import Arrivals
from costs.published import MODELS
from policies import get_policy
from policies.orders._predictions import Predicting
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.simulator import simulate

LENGTHS = Path(__file__).parent / "results" / "chats-smollm2.json"
COST, SLOTS, FIRST_SEED, WINDOWS = MODELS["oracle-a"], 8, 100, 12
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


def main() -> None:
    """Print the gains, and write them to the file of --json."""
    parser = report.parser("learned", __doc__)
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="a JSON file with the lengths of all openings")
    parser.add_argument("--policy", default="dynamic+sjf", help="loop and order to test")
    parser.add_argument("--drifts", nargs="+", default=[*DRIFTS], choices=DRIFTS, help="changes of the lengths to test")
    parser.add_argument("--numsamples", type=int, default=972, help="number of requests")
    parser.add_argument("--load", type=float, default=0.9, help="rate, as a share of what dynamic serves")
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds")
    args = parser.parse_args()
    known = json.loads(args.lengths.read_text())
    chats = known["lengths"], known["limit"], args.numsamples
    rate = args.load * capacity(*chats)
    rows = {
        drift: summary([
            compare(args.policy, partial(requests, *chats, rate, FIRST_SEED + seed, drift)) for seed in range(args.seeds)
        ])
        for drift in args.drifts
    }  # fmt: skip
    report.finish("learned", {"rate": rate, "drifts": rows}, args.json)


if __name__ == "__main__":
    main()
