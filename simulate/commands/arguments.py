"""The options that commands share: those of the engine and of the arrivals."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import policies
from client.workloads import catalog
from scheduling.speculation import MOST
from simulate import workloads
from terminal.options import FILE, POSITIVE, Argument, Choice, Number, Option, Parameter, Values

Sections = dict[str, Sequence[Parameter]]


def pairs(flag: str, help: str) -> Option:
    return Option(flag, help, metavar="NAME=VALUE", repeat=True, default=[])


def policies_argument() -> Argument:
    known = f"loops: {', '.join(policies.names())}; orders: {', '.join(policies.order_names())}"
    return Argument(
        "policies", f"loop, loop+order, or the path of a file; {known}", nargs=-1, required=True, metavar="POLICY..."
    )


SPECULATION_OPTIONS = [
    Option(
        "--acceptance", "simulate speculative decoding: the probability that a draft token is accepted if those before it are "
        "(default: no draft tokens)", Number(0, 1, kind=float, name="P"),
    ),
    Option(
        "--drafts", "with --acceptance: draft tokens per request and step, 0 to 8; auto: as many as are worth their "
        "time, as in the server", Choice(["auto", *map(str, range(MOST + 1))], "N|auto"), default="auto",
    ),
]  # fmt: skip
KV_OPTIONS = [
    Option(
        "--kv-tokens", "tokens that fit into the KV pages, which prompts with the same beginning share; 0: no limit and no sharing",
        Number(0), default=0,
    ),
    Option(
        "--page-size", "tokens per KV page; 512 is the block size of Mooncake's traces, and faster for them",
        Number(1), default=16,
    ),
]  # fmt: skip


def engine_options(
    *,
    kv: bool = True,
    speculation: bool = True,
    cost: str | None = "oracle-a",
    default_cost: str = "",
    max_batch_size: int = 32,
    max_tokens_per_step: int = 2048,
) -> list[Option]:
    """Return the options of the engine; `default_cost` describes a missing default."""
    return [
        pairs("--policy-option", "option of the policy; may be repeated; './eb simulate check --help' lists all"),
        Option("--cost", f"name of a cost model, or a file written by `calibrate`{default_cost}", default=cost),
        pairs("--cost-option", "option of the cost model; may be repeated"),
        Option(
            "--engine", "padding that costs time; as-is: the policy's own; aligned: also that of contexts",
            Choice(["as-is", "aligned"]), default="as-is",
        ),
        Option("--max-batch-size", "slots: maximum number of requests computed together", Number(1), default=max_batch_size),
        Option(
            "--max-tokens-per-step", "maximum tokens per step; longer prompts are split, except by padding policies", Number(1),
            default=max_tokens_per_step,
        ),
        *(KV_OPTIONS if kv else []),
        *(SPECULATION_OPTIONS if speculation else []),
    ]  # fmt: skip


def arrival_options(num: int = 1000, rate: float = 2.0) -> list[Option]:
    """Return the options of the arrivals."""
    return [
        Option(
            "--workload", f"a workload of the client: {', '.join(form for form, _ in catalog.describe())}",
            default="clipped-normal",
        ),
        Option(
            "--arrivals", f"{', '.join(workloads.ARRIVALS)}, or an open load of the client, such as gamma:2:0.5",
            default="poisson",
        ),
        Option("--open-loop", "misleads: send the calls of programs at fixed times, whatever was answered", None),
        Option("--rate", "requests per second, or programs", POSITIVE, default=rate),
        Option("--num", "number of requests, or of programs; with --trace: all of them, or the first N", Number(1), default=num),
        Option("--trace", "take the requests from this CSV or JSON-lines file", FILE),
        Option("--speed", "play a trace this many times as fast", POSITIVE, default=1.0),
        Option(
            "--context", "leave out requests with more tokens of prompt and answer together; above 1024, the requests of a --workload "
            "are cut to it instead; 0: keep all", Number(0, name="TOKENS"),
            default=0,
        ),
        Option(
            "--clients", "give each request one of N clients, for orders such as vtc; the k-th sends 1/k as often as "
            "the first", Number(2), default=0,
        ),
        Option(
            "--priorities", "give each request a priority from 1 (first) to N, all equally likely", Number(2),
            default=0,
        ),
        Option(
            "--slo", "give each request one of these deadlines in seconds, all equally likely, for orders such as edf", POSITIVE,
            metavar="SECONDS", several=True, default=[],
        ),
        Option("--seed", "random seed", Number(0), default=0),
    ]  # fmt: skip


def config_of(args: Values) -> dict[str, Any]:
    """Return the options that repeat a run."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in ("out", "command_line", "origin")
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
