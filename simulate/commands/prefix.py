"""Compare prefix caches: hits, TTFT and TPOT by cache and batch size."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from costs import published
from simulate import prefix
from simulate.commands.arguments import Sections
from simulate.commands.option_checks import refuse
from terminal.console import table_of
from terminal.options import Choice, Number, Option, Values

HEADS = {
    "cache": "size, tokens", "batch": "slots", "hit_tokens": "hits, tokens", "requests_per_s": "req/s",
    "p99_ttft_s": "TTFT p99, s", "p99_latency_per_token_ms": "ms per token, p99", "p99_tpot_ms": "TPOT p99, ms",
}  # fmt: skip


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "options": [
            Option("--cost", "name of a cost model, or a file written by `calibrate`", default="llm-mock"),
            Option(
                "--kinds", "caches to compare; trie: llm-mock's static trie; live: the server's pages; live+lpm: the "
                "same, with the order lpm", Choice(prefix.KINDS, "KIND"), several=True, default=list(prefix.KINDS),
            ),
            Option(
                "--sizes", "cache sizes in tokens", Number(0),
                several=True, default=[0, 100, 300, 1000, 2000, 5000],
            ),
            Option("--batches", "batch sizes", Number(1), several=True, default=[1, 5, 10, 20]),
            Option("--share", "tokens that all prompts share", Number(0), several=True, default=[0, 200]),
            Option("--train", "number of prompts that fill the cache first", Number(1), default=5000),
        ]
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Repeat llm-mock's experiment, without and with shared prompts."""
    if not any(args.sizes):
        refuse(args, [("train", "has no effect: a cache of size 0 holds nothing. Use --sizes 1000")])
    cost, host = published.make(args.cost), published.host_of(args.cost)
    result: dict[str, Any] = {"cost": args.cost, "train": args.train}
    for share in args.share:
        rows = prefix.experiment(cost, args.sizes, args.batches, share, args.train, dict.fromkeys(args.kinds), host)
        result[f"share_{share}"] = rows
        title = f"{args.cost}, prompts share {share} tokens" if share else f"{args.cost}, no shared prompts"
        lines = [[row["kind"], *(f"{row[key]:,.4g}" for key in HEADS)] for row in rows]
        console.print(table_of(title, ("cache", *HEADS.values()), lines))
    return result
