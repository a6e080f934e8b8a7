"""Measure what forms cost: tokens/s with and without them, also of their neighbors, and the time to compile a new schema.

    python -m benchmarks.structured --model smollm2 --json benchmarks/results/structured.json

The same requests, each with as many tokens as its answer in the form had, are served without forms, with the form in one of
them, and in all. The three take turns of 0.04 seconds, since the speed of a shared machine changes from second to second;
figures are medians over the rounds, and ratios of one round each. "none again" shows the noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.engine import make_runner
from benchmarks.speculation import SLICE, Server, pool_of
from generate import machine
from generate.constraint import Constraint
from generate.drafters.forced import ForcedDrafter
from generate.drafters.ngram import NgramDrafter
from generate.grammar import Grammars
from generate.params import SamplingParams
from models.sources import catalog
from models.text.tokenizer import load_tokenizer
from scheduling.sequence import Sequence
from scheduling.speculation import Speculator

TEXT = {"type": "string"}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": TEXT, "unit": {"enum": ["C", "F"]}},
    "search": {"query": TEXT, "k": {"type": "integer"}},
    "send_mail": {"to": TEXT, "subject": TEXT, "body": TEXT},
    "add_event": {"title": TEXT, "at": {"type": "string", "format": "date-time"}},
    "calc": {"expression": TEXT},
    "lookup": {"id": {"type": "integer"}},
}
LOADS = ("none", "none again", "one", "all")


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with all of these properties and no others."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip


TOOLS6 = {"anyOf": [closed({"name": {"const": name}, "arguments": closed(own)}) for name, own in TOOLS.items()]}


def new_schema(number: int) -> dict[str, Any]:
    """Return a schema of about 2 kB that no other number has."""
    fields: dict[str, Any] = {
        f"field_{number}_{i}": {"type": ["string", "integer"][i % 2], "description": "What this is about. " * 2}
        for i in range(16)
    }
    return closed({**fields, "at": {"type": "string", "format": "date-time"}, "kind": {"enum": ["a", "b", "c"]}})


def requests(load: str, prompts: list[list[int]], lengths: list[int], grammar: Any, seed: int) -> list[Sequence]:
    """Return the requests of a load."""
    made = []
    for i, (prompt, length) in enumerate(zip(prompts, lengths)):
        own = Constraint(grammar) if load == "all" or (load == "one" and i == 0) else None
        params = SamplingParams(temperature=0.8, seed=seed + i, grammar=own)
        made.append(Sequence(prompt, length, id=str(i), sampling=params))
    return made


def serve(servers: dict[str, Server], loads: dict[str, list[Sequence]], at_once: int) -> None:
    for load, server in servers.items():
        server.begin(loads[load], at_once)
    order = sorted(servers.values(), key=lambda server: random.random())
    while waiting := [server for server in order if not server.is_done]:
        min(waiting, key=lambda server: server.spent).serve(SLICE)


def run(args: argparse.Namespace) -> dict[str, Any]:
    machine.use_threads(args.threads)
    tokenizer = load_tokenizer(catalog.resolve(args.model, args.load_format), None)
    began = time.perf_counter()
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    built = time.perf_counter() - began
    grammar = grammars.compile("json", TOOLS6)
    asked = [f"Call one of the tools {', '.join(TOOLS)} for the task {i}." for i in range(args.batch)]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}])[1] for text in asked]
    longest = max(map(len, prompts)) + args.tokens + machine.PAGE_SIZE
    runner, name = make_runner(args, (len(LOADS) + 1) * args.batch * longest)
    pool = pool_of(runner)
    result: dict[str, Any] = {"model": name, "batch": args.batch, "tokenizer_s": built, "drafts": {}}
    for drafts in args.drafts:
        servers = {load: Server(runner, pool, args.batch, "0") for load in LOADS}
        for server in servers.values():
            fixed = None if drafts == "auto" else int(drafts)
            if fixed != 0:
                server.scheduler.speculator = Speculator(ForcedDrafter(NgramDrafter()), fixed, time.perf_counter)
        rates: dict[str, list[float]] = {load: [] for load in LOADS}
        for number in range(args.rounds + 1):  # the first one warms up
            first = requests("all", prompts, [args.tokens] * args.batch, grammar, 1000 * number)
            for seq in first:
                seq.stop = lambda token: "stop" if token in tokenizer.eos_ids else None
            alone = Server(runner, pool, args.batch, "0")
            alone.begin(first, args.batch)
            alone.serve(float("inf"))
            # Without the token that ends the text, behind which nothing may follow.
            lengths = [max(2, len(seq.output_ids) - (seq.finish_reason == "stop")) for seq in first]
            serve(
                servers, {load: requests(load, prompts, lengths, grammar, 1000 * number) for load in LOADS}, args.batch
            )
            for load, server in servers.items() if number else ():
                rates[load].append(server.rate)
        result["drafts"][drafts] = {
            load: {
                "tokens_per_s": statistics.median(own),
                "ratio": statistics.median(rate / base for rate, base in zip(own, rates["none"])),
            }
            for load, own in rates.items()
        }
        print(f"drafts {drafts}: {result['drafts'][drafts]}", file=sys.stderr, flush=True)  # in case the time is cut
    result["new_schema_ms"] = compile_times(grammars, args.schemas)
    return result


def compile_times(grammars: Grammars, count: int) -> dict[str, float]:
    """Return the milliseconds that new schemas of 2 kB take up to their first mask, and known ones."""
    times: dict[str, list[float]] = {"new": [], "known": []}
    for number in range(count):
        for kind in times:
            began = time.perf_counter()
            Constraint(grammars.compile("json", new_schema(number)))
            times[kind].append(1000 * (time.perf_counter() - began))
    return {
        "new, median": statistics.median(times["new"]),
        "new, 95 %": statistics.quantiles(times["new"], n=20)[-1],
        "known, median": statistics.median(times["known"]),
    }


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['model']}, {result['batch']} at once, six tools")
    for column in ("drafts", "forms in", "tokens/s", "of none"):
        table.add_column(column, justify="left" if column == "forms in" else "right")
    for drafts, loads in result["drafts"].items():
        for load, figures in loads.items():
            table.add_row(drafts, load, f"{figures['tokens_per_s']:.0f}", f"{figures['ratio']:.3f}")
    console = Console(stderr=True)
    console.print(table)
    for name, value in result["new_schema_ms"].items():
        console.print(f"schema of 2 kB, {name}: {value:.1f} ms")


def main() -> None:
    parser = report.parser("structured", __doc__)
    report.add_model(parser)
    parser.set_defaults(model="smollm2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--drafts", nargs="+", default=["0", "auto"])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schemas", type=int, default=50)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    result = run(args)
    show(result)
    report.finish("structured", result, args.json)


if __name__ == "__main__":
    main()
