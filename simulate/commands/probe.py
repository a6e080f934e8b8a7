"""Send a server a designed load of a few minutes, and fit what its steps cost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from client.flags import PORT, TIMEOUT, URL, at_port
from client.send import ask
from client.send.dialects import APIS, Dialect
from client.send.target import Target, fetch_context
from client.send.target import known as with_model
from client.workloads.corpus import USUAL_CONTEXT
from simulate.commands.arguments import Sections
from simulate.commands.fit import fit, report
from simulate.engines import known as engines
from simulate.fitting.fitted import save
from simulate.fitting.probe import Phase, Probe, plan
from simulate.logs.read import read
from terminal.console import say, table_of, writable
from terminal.options import FILE, KEY, POSITIVE, Choice, Number, Option, Values
from terminal.progress import Reporter, State


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [URL],
        "load": [
            Option("--tokens", "most tokens to spend; if the KV memory is known, up to a third fill it", Number(1000), default=60_000),
            Option("--minutes", "most time to spend", POSITIVE, default=4.0),
            Option("--dry-run", "print the plan and send nothing", None),
        ],
        "server": [
            PORT,
            Option("--engine", "what serves there, such as vllm (default: what its reports show)", metavar="NAME"),
            Option("--slots", "requests that it serves at once (default: what it reports, or the fit finds)", Number(1)),
            Option("--model", "name of the model (default: the one that the server reports)", metavar="NAME"),
            Option("--api", "API of the server", Choice(APIS), default="openai"),
            Option("--api-key", "API key", KEY, envvar="EB_API_KEY"),
            TIMEOUT,
        ],
        "output": [
            Option("--log", "file for the measured requests, which `fit` reads", FILE, default=Path("probe.jsonl")),
            Option("--out", "file for the fitted cost", FILE, default=Path("cost.json")),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Announce the load, send it, write its log, and fit; RuntimeError if the server fails."""
    args.url = at_port(args.url, args.port)
    rng, context, given = np.random.default_rng(), USUAL_CONTEXT, {"slots": args.slots} if args.slots else {}
    target = Target(args.url, args.timeout, api_key=args.api_key, dialect=Dialect(args.api, True, args.model))
    server: dict[str, Any] = {**given}
    if args.engine:
        engines.get(args.engine)  # before anything is sent
    if not args.dry_run:
        for flag in ("log", "out"):
            writable(getattr(args, flag), f"--{flag}")
        say(console, f"Asking {args.url} about itself, with GET requests only")
        target, context = with_model(target), fetch_context(target) or context
        server = {**ask.facts(args.url, args.api_key), **given}
        engine = args.engine or server.get("engine")
        if not engine:
            raise RuntimeError(f"{args.url} does not report which engine it is. Use --engine NAME, such as vllm")
        kind = engines.get(engine)
    phases = plan(args.tokens, context, server, rng)
    most = sum(phase.tokens for phase in phases)
    console.print(table_of(
        f"at most {most:,} tokens and {args.minutes:g} minutes for {args.url}",
        ("phase", "tells", "requests", "prompt", "answer", "tokens", "about s"), map(cells, phases), left=2,
    ))  # fmt: skip
    if args.dry_run:
        return {"tokens": most}
    load = Probe(target, phases, args.tokens, time.perf_counter() + 60 * args.minutes, rng)

    def state() -> State:
        left = max(0, load.until - time.perf_counter())
        return State(load.spent, most, f"{load.phase}: {load.spent:,} of {most:,} tokens, at most {left:.0f} s left")

    try:
        with Reporter(console, state, after=0):
            load.run()
    finally:
        if load.rows:
            args.log.write_text("".join(f"{json.dumps(row)}\n" for row in [{"server": server}, *load.rows]), "utf-8")
            say(console, f"{len(load.rows)} requests, {load.spent:,} tokens. Fit them again: ./eb fit {args.log}")
    if load.left_out:
        say(console, f"note: left out, or in part, for --tokens and --minutes: {', '.join(load.left_out)}")
    if not load.rows:
        raise RuntimeError(f"nothing was measured in {args.minutes:g} minutes. Raise --minutes, or check the server")
    fitted = fit(read(args.log), kind, given, console)
    save(args.out, fitted)
    report(console, fitted)
    return {"tokens": load.spent, "engine": kind.name, "log": str(args.log), "cost": str(args.out), "server": server}


def cells(phase: Phase) -> list[str]:
    """Return a row of the plan."""
    spans = [sorted({ask[i] for ask in phase.asks}) for i in (1, 2)]
    texts = (" to ".join(map(str, dict.fromkeys((span[0], span[-1])))) for span in spans)
    return [phase.name, phase.tells, f"{len(phase.asks)}", *texts, f"{phase.tokens:,}", f"{phase.seconds():.0f}"]
