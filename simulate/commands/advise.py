"""Say what other settings would have done to the requests of a log, and afterwards whether it was true."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from client.flags import LOCAL, PORT, at_port, base_url, is_address
from costs.cost import Cost
from simulate.advise.changes import Change, changes_of, chosen_of, own_change, serve, switch_for, way_of
from simulate.advise.search import DRAWS, LEAST, MET, Search, figures_of, growth
from simulate.best import regret
from simulate.commands.arguments import Sections
from simulate.commands.fit import fit
from simulate.engines import known
from simulate.fitting import fitted as fits
from simulate.fitting.fitted import Fitted
from simulate.laws import first
from simulate.logs.log import Log
from simulate.logs.read import read, served
from simulate.simulator import Run
from terminal.console import say, table_of, writable
from terminal.options import FILE, KEY, Argument, Choice, Number, Option, UsageError, Values
from terminal.progress import counted

LAW_SECONDS = 5.0  # for the check of a policy of the user's own
SAME = "no difference that can be told"


def options() -> Sections:
    """Return the options in sections of the help."""
    source = "log, file that `fit` or `probe` wrote, or URL of a server of this project"
    return {
        "arguments": [Argument("source", source, metavar="LOG|URL", required=False)],
        "options": [
            Option("--engine", "scheduler of the server (default: as the log says)", Choice(known.names(), "NAME")),
            PORT,
            Option("--api-key", "API key of the server at URL", KEY, envvar="EB_API_KEY"),
            Option("--trace", "serve the requests of this log instead", FILE),
            Option(
                "--slo", "limits in seconds of ttft, itl (mean of an answer) and latency: the goal is the share of requests "
                "within them, and otherwise the mean latency", metavar="ttft:0.5,itl:0.05",
            ),
            Option("--policy", "file of a policy or order to try too; may be repeated", metavar="FILE", repeat=True, default=[]),
            Option("--anyway", "advise even if the fit is in doubt", None),
            Option("--advice", "file of the advice", FILE, default=Path("advice.json")),
            Option("--check", "compare a log measured after a change with the advice", FILE, metavar="NEWLOG"),
            Option("--applied", "with --check: the number of the change", Number(1), default=1),
        ],
    }  # fmt: skip


def run(args: Values, console: Console) -> dict[str, Any]:
    """Advise, or compare a newer log with the advice."""
    if args.check:
        return check(args, console)
    writable(args.advice, "--advice")
    limits, own = limits_of(args.slo), [own_change(file) for file in args.policy]
    fitted = fitted_of(args, console)
    for doubt in fitted.doubts:
        say(console, f"doubt: {doubt}")
    if fitted.doubts and not args.anyway:
        say(console, "no advice, since its intervals could be wrong. Use --anyway to see it")
        return {"good": False, "doubts": fitted.doubts}
    for chosen in (chosen_of(fitted, change) for change in own):
        if broken := first.problem(chosen.name, LAW_SECONDS, chosen.options):
            say(console, f"warning: {broken}")
    done = count(1)
    with counted(console, None, "simulations") as progress:
        search = Search(fitted, limits, lambda: progress(next(done)))
        advice = search.best(changes_of(fitted), own)
    test = show(console, search, advice)
    file = args.advice.with_suffix(".fit.json").absolute()
    fits.save(file, fitted)
    result = {
        "limits": limits, "served": search.served, "advice": advice, "failed": search.failed, "fit": str(file), "test": test,
    }  # fmt: skip
    args.advice.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(console, f"written. After a change: ./eb advise --check NEWLOG --applied NUMBER --advice {args.advice}")
    if test:
        say(console, f"to test it on live traffic: {test}")
    return result


def fitted_of(args: Values, console: Console) -> Fitted:
    """Return the fit of the source, with the requests that are to be served."""
    if not args.source and not args.port:
        raise UsageError("there is neither a log nor a URL. Use ./eb advise LOG")
    if args.port or is_address(args.source):
        url = at_port(base_url(args.source or LOCAL), args.port)
        if (log := served(url, args.api_key)) is None:
            after = f"./eb advise cost.json --trace {args.trace or 'LOG'}"
            raise UsageError(f"{url} does not report what it served. Use ./eb probe {url}, and then {after}")
    else:
        try:
            fitted, log = fits.load(Path(args.source)), None
        except ValueError:  # not a file that `fit` wrote
            log = read(Path(args.source))
    if log:
        if not (engine := args.engine or log.server.get("engine")):
            raise UsageError(f"{args.source} does not say what served it. Use --engine vllm, or another")
        fitted = fit(log, known.get(engine), {}, console)
    return replace(fitted, scenario=replace(fitted.scenario, rows=read(args.trace).trace)) if args.trace else fitted


def limits_of(text: str | None) -> dict[str, float]:
    """Return the limits of --slo by name."""
    limits = {}
    for part in filter(None, (text or "").split(",")):
        name, _, value = part.partition(":")
        known_limit = name in ("ttft", "itl", "latency") and name not in limits and re.fullmatch(r"\d*\.?\d+", value)
        limits[name] = float(value) if known_limit else 0.0
        if not limits[name]:
            raise UsageError(
                f"--slo {part} is no limit, or a second one. Use seconds of ttft, itl or latency, as in ttft:0.5"
            )
    return limits


def show(console: Console, search: Search, advice: list[dict[str, Any]]) -> str:
    """Print what was served, each change, how to apply it, and the bound; return how to test the first that helps, or ""."""
    fitted, goal = search.fitted, search.names[0]
    rows = [("as served, simulated", "", search.served)]
    if fitted.scenario.rows == fitted.log.trace:  # and not those of --trace
        timed, count_of = int(np.isfinite(fitted.log.last).sum()), len(fitted.log.last)
        which = f" ({timed:,} of {count_of:,})" if timed < count_of else ""
        rows.insert(0, (f"as served, measured{which}", "", measured(fitted.log, search.limits)))
    rows += [(f"{i} {each['title']}", told(each["gains"][goal]), each["figures"]) for i, each in enumerate(advice, 1)]
    cells = [(change, gain, *(shown(name, found[name]) for name in search.names)) for change, gain, found in rows]
    requests = f"{len(fitted.scenario.rows.seen):,} requests of {fitted.kind.title}"
    caption = f"{requests}; change of {goal}, 90 % interval; in s"
    console.print(table_of(caption, ("what", "change", *search.names), cells, 2))
    better = [each for each in advice if (each["gains"][goal][1] > 0 if goal == MET else each["gains"][goal][2] < 0)]
    for i, each in enumerate(advice, 1):
        if each["notes"] or each in better:  # what is worse needs no instruction
            say(console, ". ".join((f"{i}: {way_of(fitted, each['change'])}", *each["notes"])))
    if not better:
        say(console, f"no change improves the {goal} as far as this log can tell")
    for name, why in search.failed.items():
        say(console, f"left out: {name}: {why}")
    scheduler = fitted.scenario.engine.scheduler(fitted.scenario.policies[0])
    say(console, f"as served: {regret.sentence(regret.of(serve(fitted, {}), fitted.scenario.cost, scheduler))}")
    return next(filter(None, (switch_for(fitted, each["change"]) for each in better)), "")


def check(args: Values, console: Console) -> dict[str, Any]:
    """Compare a log that was measured after a change with what is expected for its requests."""
    try:
        file = json.loads(args.advice.read_text(encoding="utf-8"))
        file["advice"], file["fit"], file["limits"]
    except (ValueError, LookupError, TypeError):
        raise UsageError(f"{args.advice} is no advice. Use --advice with a file that ./eb advise LOG wrote") from None
    if args.applied > len(file["advice"]):
        raise UsageError(
            f"--applied is {args.applied}, but {args.advice} has {len(file['advice'])} changes. Use the number of one"
        )
    fitted, log, limits = fits.load(Path(file["fit"])), read(args.check), file["limits"]
    title, change = (file["advice"][args.applied - 1][key] for key in ("title", "change"))

    def again(law: Cost, change: Change = change) -> Run:
        return serve(fitted, change, log.trace, law)

    def times(run: Run) -> dict[str, float]:
        return figures_of(run.ttft, run.latency, run.tokens, limits)

    law, real = fitted.scenario.cost, measured(log, limits)
    before, after = times(again(law, {})), again(law)
    expected = fitted.noise.intervals(again, law, after, times, DRAWS)
    true = {name: low * (1 - LEAST) <= real[name] <= high * (1 + LEAST) for name, (low, high) in expected.items()}
    cells = [(name, shown(name, before[name]), f"{shown(name, low)} to {shown(name, high)}", shown(name, real[name]),
              "yes" if true[name] else "NO") for name, (low, high) in expected.items()]  # fmt: skip
    heads = ("seconds", "without it", "expected with it", "measured", "as expected")
    console.print(table_of(f"{title}, on the requests of {args.check}", heads, cells))
    goal = next(iter(real))
    now, then = (growth(goal, before, figures) for figures in (real, times(after)))
    say(console, f"The advice was {'true' if all(true.values()) else 'not true'}: {sum(true.values())} of {len(true)} figures "
        f"are as expected. The {goal} changed by {now:+.0%}, and {then:+.0%} was expected")  # fmt: skip
    return {"good": all(true.values()), "measured": real, "expected": expected, "without": before}


def measured(log: Log, limits: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of the requests whose first and last token are in the log."""
    whole = np.isfinite(log.first) & np.isfinite(log.last)
    if not whole.any():
        raise ValueError("no request of the log has a first and a last token. Use a log of answered requests")
    at = log.at[whole]
    return figures_of(log.first[whole] - at, log.last[whole] - at, log.output[whole], limits)


def shown(name: str, value: float) -> str:
    return f"{value:.1%}" if name == MET else f"{value:,.3g}"


def told(gain: Sequence[float]) -> str:
    center, low, high = gain
    return SAME if low <= 0 <= high else f"{center:+.0%} ({low:+.0%} to {high:+.0%})"
