"""The client's command line: a load run with its numbers, or one prompt with its completion.

    python3 client.py --numsamples 100            about one request a second
    python3 client.py --prompt "hi" --numtokens 10

Human text goes to stderr. In a pipe the last line on stdout is one JSON object; on a terminal a load run writes it to a
file and prints the file's name last. This module must not know the server's code: a client machine needs only the
folders client/, terminal/ and batch_files/, and client/requirements.txt.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# A script is in no package: use the folder's.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    __package__ = Path(__file__).resolve().parent.name
    from terminal import packages as packages

from rich.console import Console

from terminal.console import FINE, SOME_FAILED, emit, emit_json, leave, say, table_of
from terminal.options import FILE, POSITIVE, Choice, Command, Number, Option, UsageError, Values

from . import data, flags, runs
from .display import guarded
from .report import store, tables, waste
from .report.measure import Outcome
from .send.dialects import Dialect
from .send.load import Failed, raise_for, send_all
from .send.target import Target, check_chat, fetch_context, fetch_stats, known
from .workloads import catalog, corpus
from .workloads.arrivals import Arrivals

RESULTS = Path("results")  # where client.compare writes too
FIRST = f"""\
By default: {flags.DEFAULT_NUMSAMPLES} requests, about one per second (Poisson), num_tokens
from a normal distribution (mean {data.NORMAL_MEAN}, sd {data.NORMAL_SD}) cut to \
{data.NORMAL_LOW}..{data.NORMAL_HIGH}, prompts of {data.MIN_WORDS}-{data.MAX_WORDS} words"""
EXAMPLES = (
    "python3 client.py --numsamples 100",
    "python3 client.py --rate 4 --seed 1 --json result.json",
    "python3 client.py --burst --numsamples 64 --numtokens_range 10 20 40",
    "python3 client.py --load closed:16 --workload orca --api openai",
    "python3 client.py --workload chat --no-stream",
    "python3 client.py --workload multi-turn:8 --load closed:8 --numsamples 128",
    "python3 client.py --workload agents --rate 0.5 http://10.0.0.5:8000",
    'python3 client.py --prompt "hi" --numtokens 10',
)


def build_command() -> Command:
    """Return the command line; a default of None shows that a flag was not given."""
    return flags.command(
        "client.py",
        f"Send a load or a single prompt to an effective-batching server or another server.\n\n{FIRST}",
        {
            "arguments": [flags.URL],
            "workload": [*flags.sent("100", "what the server reports, otherwise 1024", 0), *ORIGINAL],
            "arrivals": WHEN,
            "server": WHERE,
            "output": OUTPUT,
        },
        EXAMPLES,
    )


ORIGINAL = [
    Option(
        "--selection", "the original's workloads: normal (default); range: lengths from --numtokens_range, "
        "with prompts of the same length; buckets: 5, 10 .. 145; random, descend: lengths from "
        "--numtokens_range with short prompts, descend: longest first", Choice(data.SELECTIONS, "HOW"),
    ),
    Option(
        "--numtokens_range", "lengths to draw from, such as 10 20 40 (default 1 25 100); implies --selection range",
        Number(1), several=True,
    ),
    Option("--prompt", "send only this prompt and print the completion (--seed is passed to the server)"),
    Option("--numtokens", "tokens to generate for --prompt", Number(1)),
]  # fmt: skip
WHEN = [
    Option("--rate", "requests per second, Poisson, open loop (default 1)", POSITIVE, metavar="R"),
    Option("--wait", "the original's pace: a random delay of 0 to S seconds between requests",
           Number(0, kind=float, name="S")),
    Option("--burst", "all at once", None),
    Option("--load", "another arrival process (see below)", flags.LOAD),
]  # fmt: skip
WHERE = [
    flags.PORT,
    Option(
        "--model",
        "model name for --api openai and for chats (default: the name that the server reports)",
        metavar="NAME",
    ),
    *flags.ASKED,
]
OUTPUT = [
    Option(
        "--json", "write the full result to FILE, or - for stdout (default on a terminal: a new file in results/; "
        "in a pipe the result is always printed)", FILE,
    ),
    Option("--csv", "write one line per request as it finishes", FILE),
    Option("--original", "also show the original's figures, which are in /stats", None),
    Option("--verbose", "also print the completions of a load run", None),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of one run of the client."""

    target: Target
    flags: Values
    numsamples: int
    selection: str
    arrivals: Arrivals

    def plan(self, context: int = corpus.USUAL_CONTEXT) -> catalog.Plan:
        """Return the requests of the run for a model with this context."""
        read = self.flags
        if read.workload:
            count = read.numsamples if catalog.own_times(read.workload) else self.numsamples
            return runs.draw(read, read.workload, count, self.arrivals, read.seed, context)
        context = read.context or context
        try:
            drawn = data.plan(self.numsamples, read.numtokens_range, self.selection, self.arrivals, read.seed, context)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return catalog.Plan(drawn, self.arrivals, read.seed)

    def config(self, plan: catalog.Plan) -> dict[str, Any]:
        """Return the settings that repeat this run, without the key."""
        dialect = self.target.dialect
        return {
            "numsamples": len(plan.planned),
            "workload": self.flags.workload or f"selection {self.selection}",
            "numtokens_range": self.flags.numtokens_range,
            "load": plan.arrivals.text,
            "url": self.target.url,
            "api": dialect.api,
            "stream": dialect.stream,
            "timeout": self.target.timeout,
            "notes": plan.notes,
        }


def read_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read flags, environment and client/.env (in this order of precedence) into settings."""
    read = flags.parse(build_command(), argv, environ)
    flags.check(read)
    pace = read.load or catalog.own_times(read.workload) or Arrivals("poisson", flags.DEFAULT_RATE)
    if read.rate:
        pace = Arrivals("poisson", read.rate)
    elif read.burst:
        pace = Arrivals("burst")
    elif read.wait is not None:
        pace = Arrivals("wait", read.wait)
    dialect = Dialect(read.api, read.stream, read.model, read.temperature)
    return Settings(
        target=Target(flags.at_port(read.url, read.port), read.timeout, api_key=read.api_key, dialect=dialect),
        flags=read,
        numsamples=read.numsamples or flags.DEFAULT_NUMSAMPLES,
        selection=read.selection or ("range" if read.numtokens_range else "normal"),
        arrivals=pace,
    )


def run_single(settings: Settings, console: Console) -> int:
    """Send one prompt and print its completion; in a pipe, the last line is the answer as JSON."""
    read, target = settings.flags, settings.target
    if read.numsamples or read.wait is not None or read.numtokens_range or read.selection:
        say(console, "note: --prompt sends one request; the flags of a load run are ignored")
    seed = {"seed": read.seed} if read.is_given("seed") else {}
    planned = data.Planned(0, 0.0, read.prompt, read.numtokens)
    try:
        (outcome,) = send_all(target, [planned], on_text=lambda piece: emit(piece, end=""), fields=seed)
        raise_for(outcome, target)
    except Failed as error:
        kind, detail = error.args
        say(console, f"error: {kind}: {detail}")
        write_result({"error": kind, "detail": detail}, read.json, console)
        return SOME_FAILED
    emit(outcome.completion if outcome.first is None else "")
    elapsed_ms = 1000 * outcome.latency
    say(console, f"{outcome.tokens} tokens in {elapsed_ms:,.0f} ms, id {outcome.id or 'unknown'}")
    result = {"completion": outcome.completion, "id": outcome.id, "num_tokens": outcome.tokens,
              "prompt_tokens": outcome.prompt_tokens, "e2el_ms": elapsed_ms}  # fmt: skip
    write_result(result, read.json, console)
    return FINE


def run_load(settings: Settings, console: Console) -> int:
    """Send a load, then print and write its result."""
    read, target = settings.flags, settings.target
    fetch_stats(target)  # raises if nothing listens there
    if catalog.is_chat(read.workload):
        check_chat(target, read.workload)
    plan = settings.plan(fetch_context(target) or corpus.USUAL_CONTEXT)
    runs.allow_files(len(plan.planned), plan.arrivals.kind == "burst")
    config = settings.config(plan)
    for note in plan.notes:
        say(console, f"note: {note}")
    say(
        console,
        f"{len(plan.planned)} requests to {target.url}, {plan.arrivals.text}, {config['workload']}, seed {read.seed}",
    )
    warmup = runs.warm_up(target, plan.planned, read.warmup or 0)
    if warmup:
        say(console, f"warm-up: {warmup} requests before the run, not measured")
    with read.csv.open("w", newline="", encoding="utf-8") if read.csv else contextlib.nullcontext() as file:
        record = store.Record(file).write if file else lambda outcome: None
        pace = runs.pace_of(target, plan.planned)
        numbers, sent = runs.measure(target, plan, config, read, warmup, console, record, pace=pace)
    if read.verbose:
        for outcome in sorted(sent.outcomes, key=lambda outcome: outcome.index):
            say(console, f"--- request {outcome.index}\n{outcome.completion or outcome.error}")
    show(numbers, sent.outcomes, console, read.original)
    file = read.json
    if file is None and sys.stdout.isatty():
        file = RESULTS / f"{numbers['date']}-client-{read.seed}.json"
    write_result(numbers, file, console)
    return SOME_FAILED if numbers["failed"] or numbers["unsent"] else FINE


def show(numbers: Mapping[str, Any], outcomes: Sequence[Outcome], console: Console, original: bool) -> None:
    """Print the warnings and the tables."""
    for warning in tables.warnings_of(numbers, outcomes):
        say(console, f"warning: {warning}")
    if numbers["server_after"] is None:
        say(console, "warning: cannot read /stats from the server after the run")
    if numbers["config"]["stream"] and numbers["completed"] and numbers["mean_ttft_ms"] is None:
        say(console, "note: the server answers with all tokens at once, so there is neither TTFT nor ITL")
    spent = store.grown(numbers, "slot_steps")
    if spent and sum(spent.values()):
        fill, wasted = waste.fill(spent) or 0.0, waste.wasted(spent) or 0.0
        say(console, f"How the slots were spent: batch fill {fill:.0%}, wasted rows {wasted:.0%}")
        console.print(waste.bar(spent, min(60, console.width - 2)))
    for table in tables.programs([numbers]):
        console.print(table_of(*table, no_wrap=True))
    console.print(
        *tables.result(numbers), *(tables.originals(numbers["server_after"] or {}) if original else []), sep="\n"
    )


def write_result(numbers: Mapping[str, Any], path: Path | None, console: Console) -> None:
    """Print a result as JSON if a program reads it or `path` is -, and write it to `path`."""
    emit_json(numbers, always=path == flags.STDOUT)
    if path is None or path == flags.STDOUT:
        return
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    except OSError as error:
        say(console, f"error: cannot write {str(path)!r}: {error.strerror}. Use another --json file, or - for stdout")
    else:
        say(console, f"Full result: {path}")


@guarded
def main(console: Console, argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the client and return its exit code."""
    settings = read_settings(argv, environ)
    if settings.target.dialect.api == "openai" or catalog.is_chat(settings.flags.workload):
        settings = replace(settings, target=known(settings.target))
    if settings.flags.prompt is not None:
        return run_single(settings, console)
    return run_load(settings, console)


if __name__ == "__main__":
    leave(main())
