"""Whether the simulator knows what drafts bring: the speedup of `--speculate auto` over `off`, simulated and measured.

    python -m benchmarks.simulated_speculation --model smollm2 --json benchmarks/results/simulated_speculation.json

A run with eight drafts at every place records which would be accepted. Its steps, and those of a run without drafts, give
the law of a step. From these two the simulator predicts the runs without drafts and with as many as it chooses. Then both
are measured, one after the other in each round; the figures are medians. Prompts take no part: only steps that decode do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks import report
from benchmarks.engine import make_runner
from benchmarks.speculation import FRESH, REPEATING, Server, pool_of, prompts_of, requests
from costs.cost import Cost
from costs.drafting import RecordedDrafter, recorded
from generate import machine
from generate.runner import ModelRunner
from models.sources import catalog
from models.text.tokenizer import load_tokenizer
from policies import get_policy
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator
from simulate.measured.predict import law_of
from simulate.simulator import simulate

Records = list[dict[str, Any]]


def serve(server: Server, sequences: list[Sequence]) -> Records:
    """Serve requests that all wait at the start, and return the records of the steps."""
    for seq in sequences:
        server.scheduler.add(seq)
    records = []
    while not server.scheduler.is_idle:
        iteration = server.scheduler.step(server.runner.forward, time.perf_counter)
        assert iteration is not None
        records.append(iteration.to_dict())
    return records


def rate(records: Records) -> float:
    """Return the tokens per second of the steps in which all requests decode."""
    seconds = tokens = 0.0
    for record in records:
        if all(member["phase"] == "decode" for member in record["members"]):
            seconds += record["seconds"]
            tokens += sum(member["tokens"] for member in record["members"])
            tokens -= sum(draft["drafted"] - draft["accepted"] for draft in record.get("drafts", ()))
    return tokens / seconds


def predicted(served: list[Sequence], at_once: int, law: Cost, drafts: Records | None) -> float:
    """Return the simulated rate of the same requests; with `drafts`, those that were recorded, as many as are worth it."""
    speculator = Speculator(RecordedDrafter(recorded(drafts))) if drafts else None
    scheduler = Scheduler(get_policy("dynamic", max_batch_size=at_once), None, 256, speculator=speculator)
    fresh = [Sequence(seq.prompt_ids, len(seq.output_ids), id=seq.id) for seq in served]
    return rate([record.to_dict() for record in simulate(scheduler, fresh, law, records=True).iterations])


def compare(runner: ModelRunner, prompts: list[list[int]], at_once: int, args: argparse.Namespace) -> dict[str, float]:
    """Predict the speedup of some requests, then measure it."""
    servers = {drafts: Server(runner, pool_of(runner), at_once, drafts) for drafts in ("0", "8", "auto")}
    for server in servers.values():  # a first round warms up, and the speculator learns its law
        serve(server, requests(prompts, args, 0))
    known: Records = []
    for drafts in ("0", "8"):
        served = requests(prompts, args, 0)
        eight = serve(servers[drafts], served)
        known += eight
    law = law_of(known, padded=False)
    off, auto = (predicted(served, at_once, law, drafts) for drafts in (None, eight))
    measured: dict[str, list[float]] = {"0": [], "auto": []}
    for _ in range(args.rounds):
        for drafts, rates in measured.items():
            rates.append(rate(serve(servers[drafts], requests(prompts, args, 0))))
    speedup = statistics.median(a / b for a, b in zip(measured["auto"], measured["0"]))
    return {
        "measured_off": statistics.median(measured["0"]), "measured_auto": statistics.median(measured["auto"]),
        "measured_speedup": speedup, "simulated_off": off, "simulated_auto": auto, "simulated_speedup": auto / off,
        "error": auto / off / speedup - 1,
    }  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    machine.use_threads(args.threads)
    tokenizer = load_tokenizer(catalog.resolve(args.model, args.load_format), None)
    args.ends = frozenset(tokenizer.eos_ids)
    repeating, fresh = prompts_of(tokenizer, REPEATING), prompts_of(tokenizer, FRESH)
    both = repeating + fresh
    longest = max(map(len, both)) + args.tokens + machine.PAGE_SIZE
    runner, name = make_runner(args, (max(args.batch) + 1) * longest)
    cases = {}
    for batch in args.batch:
        kinds = {"repeating": repeating, "nothing to look up": fresh} if batch == 1 else {"both kinds": both}
        for kind, some in kinds.items():
            prompts = [some[i % len(some)] for i in range(max(len(some), 2 * batch))]
            cases[f"{batch} at once, {kind}"] = compare(runner, prompts, batch, args)
    return {"model": name, "temperature": args.temperature, "tokens": args.tokens, "cases": cases}


def show(result: dict[str, Any]) -> None:
    rows = [
        (case, f"{f['measured_speedup']:.2f}", f"{f['simulated_speedup']:.2f}", f"{f['error']:+.1%}")
        for case, f in result["cases"].items()
    ]
    report.show(f"{result['model']}: tokens/s with auto over off", ("case", "measured", "simulated", "error"), rows)


def main() -> None:
    parser = report.parser("simulated_speculation", __doc__)
    report.add_model(parser)
    parser.set_defaults(model="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    result = run(args)
    show(result)
    report.finish("simulated_speculation", result, args.json)


if __name__ == "__main__":
    main()
