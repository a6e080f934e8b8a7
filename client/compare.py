"""Compare policies or servers under the same seeded arrivals: one command, one table, one page.

The servers of policies are started here and stopped by their own pid. Results are written as they come. Human text goes
to stderr; the last line on stdout is the folder of the results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from terminal.console import FINE, emit_json, leave, say
from terminal.options import Argument, Command, Number, Option, Parameter, Read, UsageError, Values
from terminal.progress import duration

from . import ending, flags
from .display import guarded
from .experiment import Experiment, complete, name_of, without_key
from .report import verdict as judge
from .report.summary import average
from .runs import allow_files, draw
from .workloads import catalog
from .workloads.arrivals import Arrivals
from .workloads.corpus import USUAL_CONTEXT

ROOT = Path(__file__).resolve().parents[1]
SIMULATOR = ROOT / "simulate" / "__main__.py"  # started as a program: the client knows nothing else about it
THREE = ("nobatch", "static", "dynamic")
EXAMPLES = (
    "./eb compare --quick",
    "./eb compare static dynamic+sjf --load poisson:4 burst --repeats 3",
    "./eb compare ours=http://a:8500 vllm=http://b:8000 --api openai",
    "./eb compare results/x/runs/a.json results/x/runs/b.json",
)
FIRST = """\
By default: nobatch, static and dynamic, each with gpt2-medium's shape (random weights), and 100
requests of the original's workload, at one per second and in a burst. --quick uses the built-in model
bard, 16 slots, so that a burst needs several batches, and 58 requests three times: in a burst, and then
with Poisson arrivals at 70 % of the most requests per second that a loop completed in the burst. It
prints that rate and takes less than three minutes."""
QUICK = {"model": "bard", "load_format": "auto", "workload": "original-buckets", "numsamples": 58,
         "load": [Arrivals("burst")]}  # fmt: skip
QUICK_SLOTS = "16"
QUICK_REPEATS = 3
FILL = 0.7  # of the capacity that the burst shows
FULL = {"model": "gpt2-medium", "load_format": "dummy", "workload": "original", "numsamples": 100,
        "load": [Arrivals("poisson", 1.0), Arrivals("burst")]}  # fmt: skip


def check_cost(cost: str) -> str:
    """Return the absolute path of a cost file, or a cost model's name; raise ValueError for a missing file."""
    if not cost.endswith(".json"):
        return cost
    if not Path(cost).is_file():
        raise ValueError(f"{cost!r} is not a file. Create one with ./eb simulate calibrate --out FILE.json")
    return str(Path(cost).resolve())


COMPARED = [
    Option("--quick", "use bard, 16 slots and small loads: less than 3 minutes on two cores", None),
    Option("--load", "arrival processes, run one after another (see below)", flags.LOAD, several=True),
    Option("--repeats", "runs of each load; each run has the next seed (3 with --quick)", Number(1, 100), default=1),
    Option("--different", "compare two result files even if their arrivals differ", None),
]
MORE_OUTPUT = [
    Option(
        "--cost", "cost model, or file from `./eb simulate calibrate`, with which the simulator predicts each request "
        "(default: the measured steps of the servers)", Read(check_cost, "FILE"),
    ),
]  # fmt: skip


def build_command() -> Command:
    what = Argument("what", "policies, [NAME=]URL of running servers, or two result files", nargs=-1, default=[])
    sections: dict[str, Sequence[Parameter]] = {
        "arguments": [what], "comparison": [*COMPARED, flags.PORT], "workload": flags.sent("100; 58 with --quick"), "servers to start": flags.STARTED,
        "requests": flags.ASKED, "output": [*flags.OUTPUT, *MORE_OUTPUT],
    }  # fmt: skip
    intro = (__doc__ or "").partition("\n")[0]
    return flags.command("./eb compare", f"{intro}\n\n{FIRST}", sections, EXAMPLES)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Values:
    """Read the command line and fill in the values of --quick or of the full comparison."""
    args = flags.parse(build_command(), argv, environ)
    if args.load is None and (own := catalog.own_times(args.workload)):
        args.load = [own]
    args.is_rate_measured = args.quick and args.load is None
    if args.quick and not args.is_given("repeats"):
        args.repeats = QUICK_REPEATS
    if args.model and args.load_format is None:
        args.load_format = "auto"  # a named model is meant with its own weights
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.quick and not any(word.startswith("--max-batch-size") for word in args.server):
        args.server = [*args.server, "--max-batch-size", QUICK_SLOTS]
    complete(args, THREE)
    flags.check_limits(args)
    return args


def run(args: Values, console: Console, command: str) -> int:
    """Send the loads to every policy; print and write the results, even if interrupted."""
    loads = [plans_of(args, pace, i) for i, pace in enumerate(args.load)]
    for first, *_ in loads:
        allow_files(len(first.planned), first.arrivals.kind == "burst")
        for note in first.notes:
            say(console, f"note: {note}")
    experiment = Experiment(args, console, command)
    say(console, f"{', '.join(map(name_of, args.what))}; {args.workload}, seed {args.seed}")
    plans = [plan for plans in loads for plan in plans] * len(args.what)
    some = f"{len(plans)} runs of at least {duration(experiment.seconds(plans))}"
    say(console, f"{2 * len(plans)} runs in less than 3 minutes" if args.is_rate_measured else some)
    store = experiment.store
    try:
        experiment.each(partial(experiment.run_loads, loads), args.what)
        if args.is_rate_measured and not experiment.interrupted and (pace := choose_rate(store.summary, args, console)):
            measured = {run["policy"] for run in store.summary["runs"]}
            again = partial(experiment.run_loads, [plans_of(args, pace, 1)])
            experiment.each(again, [word for word in args.what if name_of(word) in measured])
    finally:
        store.close()
        if store.summary["runs"]:
            predict(store.folder, args.cost, console)
        ending.finish(store.folder, console, not args.no_plots)
    return experiment.exit_code()


def plans_of(args: Values, pace: Arrivals, place: int) -> list[catalog.Plan]:
    """Return the plan of each repeat of a load, each with a seed of its own: a run finds no prompt of another cached."""
    seeds = range(args.seed + place * args.repeats, args.seed + (place + 1) * args.repeats)
    return [draw(args, args.workload, args.numsamples, pace, seed, USUAL_CONTEXT) for seed in seeds]


def choose_rate(summary: dict[str, Any], args: Values, console: Console) -> Arrivals | None:
    """Return Poisson arrivals at `FILL` of what the best policy completed in the burst, and put them into the summary.

    None if nothing was completed.
    """
    rates = {
        name: average([run for run in summary["runs"] if run["policy"] == name], "request_throughput") or 0.0
        for name in summary["policies"]
    }
    best = max(rates, key=lambda name: rates[name])
    if not rates[best]:
        return None
    pace = Arrivals("poisson", float(f"{FILL * rates[best]:.3g}"))  # few digits, to be typed again
    summary["loads"].append(pace.text)
    summary["capacity"] = {
        "policy": best, "requests_per_second": rates[best], "share": FILL, "load": pace.text,
    }  # fmt: skip
    say(
        console, f"{best} completed {rates[best]:.3g} requests per second in the burst; {FILL:.0%} of that is "
        f"{pace.text}. To repeat this run, add --seed {args.seed} --load burst {pace.text}",
    )  # fmt: skip
    return pace


def predict(folder: Path, cost: str | None, console: Console) -> None:
    """Simulate the same requests beside the measured ones; say why where that is impossible."""
    if not SIMULATOR.is_file():
        if cost:
            raise UsageError(f"--cost {cost} needs the simulator, but this client was installed without it")
        return
    command = [sys.executable, "-m", "simulate.measured.predict", str(folder.resolve()), *([cost] if cost else [])]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    if done.returncode:
        say(console, f"note: no simulated times: {done.stderr.strip()}")
        return
    if cost and done.stderr:
        say(console, done.stderr.rstrip())
    if (folder / "simulated.json").is_file():
        for run in json.loads((folder / "simulated.json").read_text("utf-8"))["compared"]:
            if run["repeat"] == 0:  # one line a load: the repeats hardly differ
                say(console, f"{run['policy']}, {run['load']}, as simulated: {run['regret']}")
            if cost:
                mean, p99 = (
                    f"{key} {run[f'simulated_{key}_s']:.3f} s, measured {run[f'{key}_s']:.3f}"
                    for key in ("mean", "p99")
                )
                say(console, f"{run['policy']}, {run['load']}, predicted: {mean}; {p99}")


def verdict(paths: Sequence[str], different: bool, console: Console) -> int:
    """Compare two result files and print each measure with its difference."""
    both = []
    for path in paths:
        try:
            both.append(json.loads(Path(path).read_text("utf-8-sig").splitlines()[0]))
            assert isinstance(both[-1].get("e2els"), list)
        except OSError as error:
            raise UsageError(f"cannot read {path!r}: {error.strerror}. Check the path") from error
        except (ValueError, IndexError, AttributeError, AssertionError) as error:
            raise UsageError(
                f"{path!r} is not the result of a single run. Use a file from ./eb load --json or from runs/"
            ) from error
    try:
        lines = judge.compare(both[0], both[1], different)
    except judge.DifferentArrivals as error:
        raise UsageError(
            f"{paths[0]} and {paths[1]} have different arrivals, so their means are not comparable. "
            "Use runs with the same seed, workload and load, or add --different"
        ) from error
    console.print(judge.table(lines, *paths))
    emit_json([judge.as_dict(line) for line in lines])
    return FINE


@guarded
def main(console: Console, argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the comparison and return its exit code."""
    args = read(argv, environ)
    results = [word for word in args.what if word.endswith(".json")]
    if results:
        if len(results) != 2 or len(args.what) != 2:
            raise UsageError(f"a comparison takes 2 result files, not {len(args.what)}. Use A.json B.json")
        return verdict(results, args.different, console)
    return run(args, console, without_key("compare", argv))


if __name__ == "__main__":
    leave(main())
