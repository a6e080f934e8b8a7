"""Policies, or servers, on the same seeded arrivals: one command, one table, one page.

    python -m client.compare nobatch static dynamic --quick
    python -m client.compare ours=http://10.0.0.5:8500 vllm=http://10.0.0.6:8000 --api openai
    python -m client.compare A.json B.json

A policy's server is started here and stopped by its own pid. What is measured is written as it comes. Human text
goes to stderr; the last line on stdout is the folder of the results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    __package__ = Path(__file__).resolve().parent.name

from rich.console import Console

from . import ending, flags, runs
from .console import FINE, SOME_FAILED, UNREACHABLE, UsageError, emit_json, guarded, leave, say
from .experiment import Experiment, draw
from .report import simulated, store
from .send import dialects, servers
from .send.target import ServerUnreachable, Target, model_name
from .workloads import arrivals

THREE = ("nobatch", "static", "dynamic")
EXAMPLES = (
    "python -m client.compare --quick",
    "python -m client.compare --seed 1 --readme docs",
    "python -m client.compare static dynamic dynamic+sjf --load poisson:4 burst --repeats 3",
    "python -m client.compare ours=http://10.0.0.5:8500 vllm=http://10.0.0.6:8000 --api openai",
    "python -m client.compare results/x/runs/a.json results/x/runs/b.json",
)
FIRST = """\
By default: nobatch, static and dynamic, each with gpt2-medium's shape (random weights), and 100
requests of the original's workload, at one per second and in a burst. --quick uses the built-in model
bard and 58 requests, at 8 per second and in a burst, and takes less than three minutes."""
QUICK = {"model": "bard", "load_format": "auto", "workload": "original-buckets", "numsamples": 58,
         "load": [arrivals.Arrivals("poisson", 8.0), arrivals.Arrivals("burst")]}  # fmt: skip
FULL = {"model": "gpt2-medium", "load_format": "dummy", "workload": "original", "numsamples": 100,
        "load": [arrivals.Arrivals("poisson", 1.0), arrivals.Arrivals("burst")]}  # fmt: skip
COMPARED: flags.Flags = {
    "--quick": ("use bard and small loads: less than 3 minutes on two cores", {"action": "store_true"}),
    "--load": (
        "arrival processes, run one after another (see below)",
        {"type": flags.checked(arrivals.parse), "metavar": "LOAD", "nargs": "+"},
    ),
    "--repeats": (
        "runs of each load, with consecutive seeds (default 1)",
        {"type": flags.number(1, 100), "metavar": "N", "default": 1},
    ),
    "--different": ("compare two result files even if their arrivals differ", {"action": "store_true"}),
}
STARTED: flags.Flags = {
    "--model": ("model of the servers to start", {"metavar": "NAME"}),
    "--load-format": ("dummy: random weights of the right shape", {"metavar": "auto|dummy"}),
    "--server": (
        "more flags for these servers, as one argument: --server='--max-batch-size 16'",
        {"type": shlex.split, "metavar": "FLAGS", "default": []},
    ),
}
OUTPUT: flags.Flags = {
    "--out": (
        "folder for all results (default: results)",
        {"type": Path, "metavar": "DIR", "default": Path("results")},
    ),
    "--name": ("name of this comparison (default: the time and the policies)", {"metavar": "NAME"}),
    "--readme": ("also copy the table and the pictures for a README to this folder", {"type": Path, "metavar": "DIR"}),
    "--no-plots": ("write no pictures and no page", {"action": "store_true"}),
    "--cost": (
        "cost model, or file from `simulate calibrate`, with which the simulator predicts each request "
        "(default: the measured steps of the servers)",
        {"type": flags.checked(simulated.check), "metavar": "FILE"},
    ),
}


def build_parser(prog: str = "client.compare", first: str = FIRST) -> flags.Parser:
    """Build the command line."""
    parser = flags.Parser(
        prog=f"python -m {prog}",
        description=(__doc__ or "").partition("\n")[0],
        epilog=flags.epilog(first, EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", nargs="*", help="policies, name=URL of running servers, or two result files")
    asked = {**flags.ASKED}
    text = "request complete answers instead of streams (no TTFT, TPOT or ITL)"
    asked["--stream"] = (text, {"action": argparse.BooleanOptionalAction, "default": True})
    flags.add(parser, "comparison", COMPARED)
    flags.add(parser, "workload", flags.SENT)
    flags.add(parser, "servers to start", STARTED)
    flags.add(parser, "requests", asked)
    flags.add(parser, "output", OUTPUT)
    return parser


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line and fill in what --quick or the full comparison mean."""
    given = build_parser().read(argv)
    if (given.workload or "").startswith("trace:") and not given.load:
        given.load = [arrivals.Arrivals("trace", 1.0)]
    for name, value in (QUICK if given.quick else FULL).items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    given.what = given.what or list(THREE)
    flags.check_limits(given)
    if len(set(names(given.what))) < len(given.what):
        raise UsageError(f"{' '.join(given.what)} has the same name twice. Use name=URL, or each policy once")
    return given


def names(what: Sequence[str]) -> list[str]:
    """Give the name of each policy or server."""
    return [word.partition("=")[0] if "=http" in word else word for word in what]


@contextlib.contextmanager
def reached(word: str, given: argparse.Namespace, environ: Mapping[str, str], folder: Path) -> Iterator[Target]:
    """Give the target of `name=URL`, or of a server that is started for the length of the block."""
    key = flags.api_key(given.api_key, flags.stored(environ))
    dialect = dialects.Dialect(given.api, given.stream)
    url = word.partition("=")[2]
    if not url.startswith("http"):
        extra = ["--model", given.model, "--load-format", given.load_format, *given.server]
        log = folder / f"server-{store.slug(word)}.log"
        with servers.started(word, extra, log, key) as url:
            yield Target(url, given.timeout, api_key=key, dialect=dialect)
        return
    try:
        url = flags.base_url(url)
    except argparse.ArgumentTypeError as error:
        raise UsageError(str(error)) from error
    target = Target(url, given.timeout, api_key=key, dialect=dialect)
    if given.api == "openai":
        named = dialects.Dialect(given.api, given.stream, model_name(target))
        target = Target(url, given.timeout, api_key=key, dialect=named)
    yield target


def make_store(given: argparse.Namespace, seed: int, command: str) -> store.Store:
    """Open the folder of the results."""
    now = datetime.now().astimezone()
    called = given.name or "-".join(store.slug(name) for name in names(given.what))[:60]
    folder = given.out / (given.name or f"{now:%Y%m%d-%H%M%S}-{called}")
    if (folder / "summary.json").exists():
        raise UsageError(f"{str(folder)!r} already has results. Use another --name")
    head = {
        "name": called, "date": now.isoformat(timespec="seconds"), "command": command, "seed": seed,
        "workload": given.workload, "loads": [pace.text for pace in given.load],
        "policies": names(given.what), "machine": runs.machine(), "versions": runs.versions(),
    }  # fmt: skip
    try:
        return store.Store(folder, head)
    except OSError as error:
        raise UsageError(f"cannot write {str(folder)!r}: {error.strerror}. Use another --out folder") from error


def run(given: argparse.Namespace, environ: Mapping[str, str], console: Console, command: str) -> int:
    """Put every policy through the loads; show and keep what was measured, whatever happened."""
    seed = secrets.randbits(32) if given.seed is None else given.seed
    loads = draw(given, seed, given.numsamples, given.workload)
    for load in loads:
        runs.allow_files(len(load.plans[0].planned), load.arrivals.kind == "burst")
        for note in load.plans[0].notes:
            say(console, f"note: {note}")
    folder = make_store(given, seed, command)
    say(console, f"{', '.join(names(given.what))}; {given.workload}, seed {seed}")
    experiment = Experiment(folder, console, given, seed)
    experiment.write_plans(loads)
    missing = 0
    try:
        for i, word in enumerate(given.what):
            name = names([word])[0]
            try:
                with reached(word, given, environ, folder.folder) as target:
                    experiment.run_loads(name, target, loads, f"[{i + 1}/{len(given.what)}] ")
            except ServerUnreachable as error:
                missing += 1
                folder.warn(f"{name}: cannot start or reach the server: {error}")
                say(console, f"error: {name}: {error}. Start the server by hand to see why, or leave it out")
            if experiment.interrupted:
                folder.warn("stopped early by Ctrl-C")
                break
    finally:
        folder.close()
        if folder.summary["runs"]:
            simulated.predict(folder.folder, given.cost, console)
        ending.finish(folder.folder, console, not given.no_plots)
        if given.readme:
            ending.copy_for_readme(folder.folder, given.readme, console)
    if missing == len(given.what):
        return UNREACHABLE
    return SOME_FAILED if missing or experiment.failed or experiment.interrupted else FINE


def verdict(paths: Sequence[str], different: bool, console: Console) -> int:
    """Compare two result files and print each measure with its difference."""
    from .report import verdict as judge

    both = []
    for path in paths:
        try:
            both.append(json.loads(Path(path).read_text("utf-8").splitlines()[0]))
            assert isinstance(both[-1].get("e2els"), list)
        except (OSError, ValueError, IndexError, AttributeError, AssertionError) as error:
            raise UsageError(
                f"{path!r} is not the result of a single run. Use a file from client.py --json or from runs/"
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


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the comparison and give its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command(console: Console) -> int:
        given = read(arguments)
        results = [word for word in given.what if word.endswith(".json")]
        if results:
            if len(results) != 2 or len(given.what) != 2:
                raise UsageError(f"a comparison takes 2 result files, not {len(given.what)}. Use A.json B.json")
            return verdict(results, given.different, console)
        text = shlex.join(["python", "-m", "client.compare", *hidden(arguments)])
        return run(given, os.environ if environ is None else environ, console, text)

    return guarded(command, lambda: None)


def hidden(arguments: Sequence[str]) -> list[str]:
    """Give the command without its key, for the page."""
    shown = list(arguments)
    for i, word in enumerate(shown):
        if word.startswith("--api-key="):
            shown[i] = "--api-key=KEY"
        elif word == "--api-key" and i + 1 < len(shown):
            shown[i + 1] = "KEY"
    return shown


if __name__ == "__main__":
    leave(main())
