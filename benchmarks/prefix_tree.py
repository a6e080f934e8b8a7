"""What the order prefix-tree saves: many requests over a few shared prefixes, on a cache that cannot hold them all.

    python -m benchmarks.prefix_tree --model smollm2 --kv-memory 64M --json benchmarks/results/prefix-tree.json

A server with `dynamic` and one with `dynamic+prefix-tree` get the same requests in turn, shuffled. A request that needs all
pages comes first, so that the others arrive before one of them begins; the figures are of their steps alone. Each server is
then simulated on its own pages, with a step law and pauses that are fitted to its own steps, and with those of `dynamic`. The
simulated cache is not given the server's hits: it finds prefixes by their tokens. Other flags are those of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

import policies
from batch_files.lines import Line
from benchmarks import report
from client.send import servers
from client.send.batch_load import BatchRun
from client.send.events import EventRecorder
from client.send.target import Target, fetch_context, fetch_stats
from costs.cost import Cost, Host, Scaled
from scheduling.pages import PagePool
from scheduling.scheduler import Scheduler
from scheduling.sequence import Sequence
from simulate.measured.predict import law_of, step_of
from simulate.simulator import Run, simulate
from terminal.console import table_of

POLICIES = ("dynamic", "dynamic+prefix-tree")
PAGE = 16
VOCABULARY = 4000  # token ids that every model has
PATIENCE = 60.0  # seconds without an answer
HELD_STEPS = 256  # in which the requests arrive
Records = list[dict[str, Any]]


def drawn(count: int, prefixes: int, tokens: int, tail: int = 20, answer: int = 24, seed: int = 1) -> list[Sequence]:
    """Return shuffled requests with `prefixes` beginnings of `tokens` tokens, then 4 to `tail`, answered by 4 to `answer`."""
    rng = random.Random(seed)
    heads = [[rng.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(prefixes)]
    chosen = [heads[i % prefixes] for i in range(count)]
    rng.shuffle(chosen)
    return [
        Sequence(
            [*head, *(rng.randrange(VOCABULARY) for _ in range(rng.randint(4, tail)))], rng.randint(4, answer), id=f"r{i}"
        )
        for i, head in enumerate(chosen)
    ]  # fmt: skip


def least(sequences: list[Sequence], page_size: int = PAGE) -> int:
    """Return the fewest prompt tokens to compute: each distinct page of the trie once, and what is behind the last."""
    pool = PagePool(2, page_size)
    chains = [pool.hashes(seq.prompt_ids) for seq in sequences]
    tails = sum(len(seq.prompt_ids) - page_size * len(chain) for seq, chain in zip(sequences, chains))
    return page_size * len({block for chain in chains for block in chain}) + tails


def serve(policy: str, flags: list[str], sequences: list[Sequence]) -> tuple[float, Records, dict[str, Any]]:
    """Send all requests to a new server; return the seconds of their steps, the steps, and the engine of its /stats."""
    lines = [line(seq.id, seq.prompt_ids, seq.max_tokens) for seq in sequences]
    feed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, servers.started(policy, flags, Path(folder) / "log") as url:
        target = Target(url)
        warm = line("warm", [1] * 8, 4)  # shorter than a page, so that it leaves nothing in the cache
        asyncio.run(BatchRun(target, lambda row, is_error: None, 1, PATIENCE).send(iter([warm])))
        events = EventRecorder(target, feed)
        events.start()
        if not events.is_connected():
            raise SystemExit("error: the server sends no /events, so its steps are unknown")
        kv = (fetch_stats(target) or {})["engine"]["kv"]
        room = min(fetch_context(target) or 0, kv["pages_total"] * kv["page_size"])
        events.label({"run": policy})
        run = BatchRun(target, lambda row, is_error: None, len(lines), PATIENCE)
        asyncio.run(at_once(run, lines, line("all-pages", [1] * (room - HELD_STEPS), HELD_STEPS)))
        events.settle()
        events.close()
        engine = (fetch_stats(target) or {})["engine"]
    if run.tokens != sum(seq.max_tokens for seq in sequences):
        raise SystemExit(f"error: {run.failed} of {len(lines)} requests failed. Lower --requests or raise --kv-memory")
    records = [json.loads(row) for row in feed.getvalue().splitlines()]
    records = [record for record in records if all(member["total"] < room for member in record["members"])]
    return records[-1]["t"] + records[-1]["seconds"] - records[0]["t"], records, engine


def line(id: str, prompt: list[int], tokens: int) -> Line:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return Line(0, id, "/v1/completions", body)


async def at_once(run: BatchRun, lines: list[Line], first: Line) -> None:
    """Send `first`, which needs all pages, and then the lines, so that they arrive before one of them can begin."""
    holder = BatchRun(run.target, run.write, 1, PATIENCE)
    held = asyncio.create_task(holder.send(iter([first])))
    await asyncio.sleep(0.2)
    await run.send(iter(lines))
    await held


def law_and_pause(records: Records) -> tuple[Cost, Host]:
    """Return what a server's steps and the pauses between them take, by a law that is right for all steps together.

    The fit minimizes relative errors, so it is too low where steps of one size vary.
    """
    law = law_of(records, padded=False)
    factor = sum(record["seconds"] for record in records) / sum(
        law.seconds(step_of(record, False)) for record in records
    )
    pairs = pairwise(records)
    pauses = [b["t"] - a["t"] - a["seconds"] for a, b in pairs if len(a["left"]) < len(a["members"])]
    return Scaled(law, factor), Host(sigma=max(0.0, mean(pauses)))


def predicted(policy: str, records: Records, engine: dict[str, Any], sequences: list[Sequence]) -> Run:
    """Simulate the requests on the pages of a server, with steps that take as long as those of `records`."""
    kv = engine["kv"]
    pool = PagePool(kv["pages_total"] + 1, kv["page_size"])
    scheduler = Scheduler(policies.get_policy(policy, engine["max_batch_size"]), pool, engine["max_tokens_per_step"])
    return simulate(scheduler, sequences, *law_and_pause(records))


def measure(policy: str, flags: list[str], args: argparse.Namespace, plain: Records) -> dict[str, Any]:
    """Return what a server did with the requests, and what its own steps and those of the plain server predict for it.

    `plain` gets the steps of the first server.
    """

    def fresh() -> list[Sequence]:
        return drawn(args.requests, args.prefixes, args.prefix_tokens, answer=args.answer_tokens, seed=args.seed)

    sequences = fresh()
    seconds, records, engine = serve(policy, flags, sequences)
    plain += [] if plain else records
    own, by_plain = (predicted(policy, steps, engine, fresh()) for steps in (records, plain))
    page_size, rate = engine["kv"]["page_size"], sum(seq.max_tokens for seq in sequences) / seconds
    members = [member for record in records for member in record["members"]]
    return {
        "policy": policy,
        "prefixes_in_cache": engine["kv"]["pages_total"] * page_size / args.prefix_tokens,
        "prompt_tokens": sum(member["tokens"] for member in members if member["phase"] == "prefill"),
        "least_prompt_tokens": least(sequences, page_size),
        "predicted_prompt_tokens": sum(len(seq.prompt_ids) - seq.cached for seq in own.sequences),
        "steps": len(records),
        "predicted_steps": own.steps,
        "busy_share": sum(record["seconds"] for record in records) / seconds,
        "tokens_per_s": rate,
        "predicted_tokens_per_s": own.throughput,
        "predicted_by_plain_steps": by_plain.throughput,
    }


def show(plain: dict[str, Any], tree: dict[str, Any]) -> None:
    rows = []
    for row in (plain, tree):
        rate = row["tokens_per_s"]
        foreseen = [row[name] for name in ("predicted_tokens_per_s", "predicted_by_plain_steps")]
        shown = [f"{value:.0f} ({value / rate - 1:+.1%})" for value in foreseen]
        bound = row["prompt_tokens"] / row["least_prompt_tokens"]
        rows.append([row["policy"], f"{row['prompt_tokens']:,}", f"{bound:.3f}", f"{rate:.0f}", *shown])
    names = ("tokens_per_s", "predicted_tokens_per_s", "predicted_by_plain_steps")
    rows.append(["ratio", "", "", *(f"{tree[name] / plain[name]:.2f}" for name in names)])
    heads = ("", "prompt tokens", "of the bound", "tokens/s", "by its steps", "by dynamic's")
    Console(stderr=True, width=110).print(
        table_of(f"a cache for {plain['prefixes_in_cache']:.1f} prefixes", heads, rows)
    )


def main() -> None:
    parser = report.parser("prefix_tree", __doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-memory", default="64M", help="of the server; less than the prefixes need (64M)")
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prefixes", type=int, default=40)
    parser.add_argument("--prefix-tokens", type=int, default=192)
    parser.add_argument("--answer-tokens", type=int, default=24, help="of the longest answer; the shortest has 4 (24)")
    parser.add_argument("--seed", type=int, default=1)
    args, other = parser.parse_known_args()
    flags = ["--model", args.model, "--kv-memory", args.kv_memory, "--max-batch-size", str(args.max_batch_size)]
    flags += ["--max-queue", str(args.requests), "--speculate", "off", "--access-log", "off", *other]
    records: Records = []
    plain, tree = (measure(policy, flags, args, records) for policy in POLICIES)
    show(plain, tree)
    ratio = tree["tokens_per_s"] / plain["tokens_per_s"]
    result = {"model": args.model, "requests": args.requests, "prefixes": args.prefixes, "ratio": ratio}
    report.finish("prefix_tree", {**result, "servers": [plain, tree]}, args.json)


if __name__ == "__main__":
    main()
