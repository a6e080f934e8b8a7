"""Time the engine on this machine, or read the steps of a recorded vLLM, and fit a cost model to them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from costs import cost as costs
from simulate.commands.arguments import Sections, now
from simulate.commands.option_checks import refuse
from simulate.measured import calibrate
from simulate.measured.recorded import cost_of
from terminal.console import say
from terminal.options import FILE, Choice, Number, Option, UsageError, Values


def options() -> Sections:
    """Return the options in sections of the help."""
    return {"options": [
        Option("--model", "model to time", default="gpt2-medium"),
        Option("--load-format", "dummy: random weights of the model's shape", Choice(["auto", "dummy"]), default="auto"),
        Option("--dtype", "number format of the weights", Choice(["auto", "float32", "bfloat16"]), default="auto"),
        Option(
            "--quantize", "format of the weights of linear layers", Choice(["none", "as-stored", "int8", "int4"]), default="none",
        ),
        Option("--kv-dtype", "number format of keys and values", Choice(["auto", "int8"]), default="auto"),
        Option("--threads", "compute threads; 0: as many as the server uses", Number(0), default=0),
        Option("--grid", "how many points to time", Choice(["small", "full"]), default="small"),
        Option("--max-tokens-per-step", "longest chunk of a prompt to time", Number(8), default=256),
        Option("--context", "longest sequence to time, at most the model's context", Number(64), default=1024),
        Option("--steps", "number of steps per point, in each of two passes", Number(1), default=5),
        Option("--record", "fit the steps in a record of ./eb vllm serve --record, and time nothing", FILE),
        Option("--out", "file to write", FILE, default=Path("cost.json")),
    ]}  # fmt: skip


def flags_of(settings: Any, **more: Any) -> list[str]:
    """Return the flags of `dev.benchmarks.probe` for the engine with these settings."""
    engine = {name: getattr(settings, name) for name in ("model", "load_format", "dtype", "quantize", "kv_dtype")}
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in (engine | more).items())
    return [word for pair in pairs for word in pair]


def run(args: Values, console: Console) -> dict[str, Any]:
    """Time the engine, fit a cost model, report its error and write the file."""
    if args.out.is_dir():
        raise UsageError(f"--out is {str(args.out)!r}, which is a folder. Use {args.out / 'cost.json'}")
    if args.record:
        if args.out.exists() and args.record.exists() and args.out.samefile(args.record):
            raise UsageError(
                f"--out and --record are both {str(args.out)!r}, and the record would be lost. Use another --out"
            )
        refuse(args, [(" ".join(args.origin.keys() - {"record", "out"}), "has no effect with --record. Leave it out")])
        return of_record(args, console)
    facts: dict[str, Any] = {"date": now(), "max_tokens_per_step": args.max_tokens_per_step}
    more = {name: getattr(args, name) for name in ("threads", "context", "steps")}
    points = calibrate.grid(args.grid, args.max_tokens_per_step, args.context)
    began = time.perf_counter()
    measure = calibrate.shown(calibrate.probe(flags_of(args, **more), facts), console)
    fit, rows = calibrate.calibrate(measure, points, facts)
    calibrate.write(args.out, fit, rows, costs.Host(), facts)
    say(console, f"{fit.cost}")
    report(fit, console)
    say(console, f"{len(rows)} points in {time.perf_counter() - began:.0f} s")
    say(console, f"written: {args.out}. Use it: ./eb simulate run dynamic --cost {args.out}")
    return {
        "file": str(args.out),
        "cost": costs.to_dict(fit.cost),
        "mape": fit.mape,
        "worst": fit.worst,
        "drift": fit.drift,
    }


def of_record(args: Values, console: Console) -> dict[str, Any]:
    """Fit a cost model to the steps in a record of vLLM, report its error and what it cannot know, and write the file."""
    content = cost_of(args.record)
    args.out.write_text(json.dumps(content) + "\n")
    mape, drift, seen = (content[name] for name in ("mape", "drift", "seen"))
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in content["machine"].items())
    flags += " --policy-option reserve=prompt"  # as inside vLLM
    say(console, f"{content['steps']:,} steps; error {mape:.1%}, of the means of each size {drift:.1%}")
    say(console, f"not in it: HTTP; tokenizing; over {seen['decodes']} decodes or {seen['prompt']:,} prompt tokens")
    say(console, f"written: {args.out}. Use it: ./eb simulate run dynamic --cost {args.out} {flags}")
    return {"file": str(args.out), **{name: content[name] for name in ("cost", "host", "mape", "drift", "seen")}}


def report(fit: calibrate.Fit, console: Console) -> None:
    """Print the error of a fit, and warn where predictions will be poor."""
    say(console, f"error on points left out of the fit: {fit.mape:.1%} on average, {fit.worst:.1%} at worst")
    if fit.drift > calibrate.DRIFT:
        say(
            console,
            f"warning: the two times of a step differ by {fit.drift:.0%}, so other programs used this machine. "
            "Calibrate again when nothing else runs",
        )
    if fit.mape > calibrate.ACCEPT_MAPE or fit.worst > calibrate.ACCEPT_WORST:
        bounds = f"{calibrate.ACCEPT_MAPE:.0%} on average or {calibrate.ACCEPT_WORST:.0%} at worst"
        say(console, f"warning: the error is above {bounds}, so predictions will be poor")
