"""Fit what the steps of a server cost from a log of its requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from client.flags import AT, LOCAL, PORT, at_port
from client.send import ask
from client.send.target import Target
from costs import cost as costs
from simulate.commands.arguments import Sections, pairs
from simulate.engines import known
from simulate.engines.known import Kind
from simulate.fitting import fit as fitting
from simulate.fitting.fitted import Fitted, held, measured, save
from simulate.logs.log import Log
from simulate.logs.read import read
from simulate.measured.comparison import Comparison
from simulate.measured.intervals import Interval
from simulate.simulator import Run
from terminal.console import say, table_of, writable
from terminal.options import FILE, KEY, Argument, Choice, Number, Option, UsageError, Values, read_pairs
from terminal.progress import counted

DRAWS = 20  # simulations for the intervals
SETTINGS = {"slots": "slots", "tokens_per_step": "max_tokens_per_step", "kv_tokens": "kv_tokens"}  # and their options
MEANING = {"option": "option", "log": "log or URL", "usual": "usual value, not checked", "fitted": "fitted"}
TERMS = {
    "base": "each step", "decode": "each row that decodes", "prompt": "each prompt token", "start": "each row with prompt tokens",
    "prefill": "a step with prompt tokens", "context": "each token of context read", "pair": "each pair of prompt token and token before it",
    "hinge": "each token beyond the knee", "experts": "all experts read",
}  # fmt: skip
NOTE = (
    "The log may be of any server: a result of this client or a folder of ./eb compare, of 'vllm bench serve --save-detailed', "
    "guidellm, aiperf or LLMServingSim, OpenTelemetry spans of vLLM, or an iterations.jsonl. docs/advise.md says how each is made."
)


def options() -> Sections:
    """Return the options in sections of the help."""
    return {
        "arguments": [
            Argument("log", "log of requests", FILE, required=True, metavar="LOG"),
            Argument("url", "server to ask for its settings", AT, required=False),
        ],
        "server": [
            Option("--engine", "scheduler of the server (default: what the log or URL says)", Choice(known.names())),
            PORT,
            Option("--api-key", "API key of that server", KEY, envvar="EB_API_KEY"),
            Option("--slots", "requests that it computes together", Number(1)),
            Option("--max-tokens-per-step", "tokens that it computes in a step", Number(1)),
            Option("--kv-tokens", "tokens that its KV memory holds; 0: no limit", Number(0)),
            pairs("--policy-option", "option of the scheduler, such as overlap=off for vllm; may be repeated"),
        ],
        "output": [
            Option("--held-out", "fit only the first part, and compare the last N % of the requests with it", Number(1, 90)),
            Option("--out", "cost file to write", FILE, default=Path("cost.json")),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Fit a log, print the law and how sure it is, and write the cost file."""
    writable(args.out, "--out")
    log = read(args.log)
    log, kind, given = server_of(log, args, console)
    count = len(log.at) - (round(args.held_out * len(log.at) / 100) if args.held_out else 0)
    began = time.perf_counter()
    fitted = fit(log.until(count) if args.held_out else log, kind, given, console)
    report(console, fitted)
    say(console, f"fitted in {time.perf_counter() - began:.0f} s")
    result: dict[str, Any] = {"file": str(args.out), "engine": kind.name, "cost": costs.to_dict(fitted.law), "host": asdict(fitted.scenario.host),
              "sources": fitted.sources, "misfit": fitted.misfit, "doubts": fitted.doubts}  # fmt: skip
    if args.held_out:
        if guess := fitted.guesses(*times_of(fitted.replay(fitted.law))):
            say(console, f"warning: {guess}")
            result["doubts"] = [*fitted.doubts, guess]
        compared = compare(fitted, log, np.arange(len(log.at)) >= count)
        console.print(
            table_of_compared(f"the last {len(log.at) - count} requests, which the fit did not see", compared)
        )
        result["held_out"] = [c.to_dict() for c in compared]
    save(args.out, fitted)
    say(console, f"written: {args.out}. What would have served these requests better: ./eb advise {args.out}")
    return result


def server_of(log: Log, args: Values, console: Console) -> tuple[Log, Kind, dict[str, Any]]:
    """Return the log with what the server says of itself, the kind of its scheduler, and the settings that options give."""
    if args.url or args.port:
        url = at_port(args.url or LOCAL, args.port)
        facts = ask.facts(url, args.api_key)
        asked = facts.pop("asked", ())
        if asked and not any(" HTTP " in each for each in asked):
            raise Target(url).unreachable()
        if not facts:
            say(console, f"warning: {url} reports no settings that are known. Use --slots and --kv-tokens")
        say(console, f"asked {url}: {', '.join(asked)}")
        log = replace(log, server={**log.server, **facts})
    engine = args.engine or log.server.get("engine")
    if not engine:
        raise UsageError(f"{args.log} does not say what served it. Use --engine: {', '.join(known.names())}")
    given = {name: getattr(args, option) for name, option in SETTINGS.items()}
    return log, known.get(engine), {**given, **read_pairs(args.policy_option, "--policy-option")}


def fit(log: Log, kind: Kind, given: Mapping[str, Any], console: Console) -> Fitted:
    """Fit a log, with progress; print what is wrong with it."""
    for note in log.notes:
        say(console, f"note: {note.text}")
    with counted(console, None, "simulations of the log") as tick:
        fitted = fitting.fit(log, kind, given, tick)
    rows, slots = held(log, log.first, log.last)[0], fitted.scenario.engine.slots
    if fitted.sources["slots"] == "usual" and rows < slots:
        say(console, f"warning: the usual {slots} slots are a guess: the log fills {rows} at most. Use --slots")
    return fitted


def times_of(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return when the requests of a run got their first and their last token."""
    first, last = ([getattr(seq, name) or 0.0 for seq in run.sequences] for name in ("first_token_at", "finished_at"))
    return np.array(first), np.array(last)


def compare(fitted: Fitted, log: Log, among: np.ndarray) -> list[Comparison]:
    """Return what the fit predicts for some requests beside what the log says, with intervals."""
    among = among & np.isfinite(log.first) & np.isfinite(log.last)

    def some(run: Run) -> dict[str, float]:
        return measured(log, *times_of(run), among)

    law = fitted.scenario.cost
    expected, real = fitted.replay(law), measured(log, log.first, log.last, among)
    intervals = fitted.noise.intervals(fitted.replay, law, expected, some, DRAWS)
    return [Comparison(name, value, real[name], interval=intervals[name]) for name, value in some(expected).items()]


def table_of_compared(title: str, compared: Sequence[Comparison]) -> Table:
    """Return predictions beside measurements; columns that no figure has are left out."""
    columns = {"": [c.name for c in compared], "predicted": [_shown(c.predicted, c.unit) for c in compared]}
    if any(c.interval for c in compared):
        columns["90 % interval"] = ["" if c.interval is None else _between(c.interval) for c in compared]
    columns["measured"] = [_shown(c.measured, c.unit) for c in compared]
    columns["error"] = [f"{c.error:+.1%}" for c in compared]
    if any(c.bound for c in compared):
        columns["bound"] = ["" if c.bound is None else f"{c.bound:.0%}" for c in compared]
    return table_of(title, list(columns), list(zip(*columns.values())))


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.3f} s" if value >= 1 else f"{1000 * value:.1f} ms"
    return f"{value:.1%}" if unit == "%" else f"{value:.2f}"


def _between(interval: Interval) -> str:
    scale, unit = (1, "s") if interval.low >= 1 else (1000, "ms")
    low, high = (f"{bound * scale:.3g}" for bound in interval)
    return f"{low} to {high} {unit}"


def report(console: Console, fitted: Fitted) -> None:
    """Print the settings and where each is from, the law in milliseconds, its errors, and what to doubt."""
    scenario = fitted.scenario
    settings = {**asdict(scenario.engine), **scenario.policies[0].options}
    rows = [(name, f"{settings[name]}", MEANING[source]) for name, source in fitted.sources.items()]
    title = f"scheduler: {fitted.kind.title} ({scenario.policies[0].name.rpartition('.')[2]})"
    console.print(table_of(title, ("setting", "value", "from"), rows, words=["from"]))
    law = [
        (name, f"{1000 * getattr(fitted.law, name):.4g} ms", each)
        for name, each in TERMS.items()
        if getattr(fitted.law, name)
    ]
    host = [
        ("first step", f"{1000 * scenario.host.first_step:.4g} ms", "once"),
        ("arrival", f"{1000 * scenario.host.alpha0:.4g} ms", "each request"),
    ]
    console.print(table_of("what a step costs", ("", "time", "for"), law + host, words=["for"]))
    first, whole = (f"{fitted.misfit[name]:.1%}" for name in ("ttft", "latency"))
    say(console, f"single requests of the log: first tokens off by {first} of their mean time, answers by {whole}")
    for doubt in fitted.doubts:
        say(console, f"warning: {doubt}")
