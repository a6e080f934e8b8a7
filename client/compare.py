"""Compare policies or servers under the same seeded arrivals: one command, one table, one page.

    python -m client.compare nobatch static dynamic --quick
    python -m client.compare ours=http://10.0.0.5:8500 vllm=http://10.0.0.6:8000 --api openai
    python -m client.compare A.json B.json

The servers of policies are started here and stopped by their own pid. Results are written as they come. Human text goes
to stderr; the last line on stdout is the folder of the results.
"""

from __future__ import annotations

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

from terminal.console import FINE, emit_json, leave, say
from terminal.options import FOLDER, Argument, Choice, Command, Number, Option, Parameter, Read, UsageError, Values

from . import ending, flags, runs
from .display import guarded
from .experiment import Experiment, draw
from .report import simulated, store
from .send import dialects, servers
from .send.target import Target, known
from .workloads import arrivals, catalog

THREE = ("nobatch", "static", "dynamic")
EXAMPLES = (
    "python -m client.compare --quick",
    "python -m client.compare --seed 1 --readme docs",
    "python -m client.compare static dynamic+sjf --load poisson:4 burst --repeats 3",
    "python -m client.compare ours=http://a:8500 vllm=http://b:8000 --api openai",
    "python -m client.compare results/x/runs/a.json results/x/runs/b.json",
)
FIRST = """\
By default: nobatch, static and dynamic, each with gpt2-medium's shape (random weights), and 100
requests of the original's workload, at one per second and in a burst. --quick uses the built-in model
bard, 16 slots, so that a burst needs several batches, and 58 requests, at 8 per second and in a burst;
it takes less than three minutes."""
QUICK = {"model": "bard", "load_format": "auto", "workload": "original-buckets", "numsamples": 58,
         "load": [arrivals.Arrivals("poisson", 8.0), arrivals.Arrivals("burst")]}  # fmt: skip
QUICK_SLOTS = "16"
FULL = {"model": "gpt2-medium", "load_format": "dummy", "workload": "original", "numsamples": 100,
        "load": [arrivals.Arrivals("poisson", 1.0), arrivals.Arrivals("burst")]}  # fmt: skip
COMPARED = [
    Option("--quick", "use bard, 16 slots and small loads: less than 3 minutes on two cores", None),
    Option("--load", "arrival processes, run one after another (see below)", flags.LOAD, several=True),
    Option("--repeats", "runs of each load, with consecutive seeds", Number(1, 100), default=1),
    Option("--different", "compare two result files even if their arrivals differ", None),
]
STARTED = [
    Option("--model", "model of the servers to start", metavar="NAME"),
    Option("--load-format", "dummy: random weights of the right shape (default: auto if --model is used)", Choice(["auto", "dummy"])),
    Option(
        "--server", "more flags for these servers, as one argument: --server='--max-batch-size 16'. Speculative decoding is off "
        "unless --speculate auto is among them",
        Read(shlex.split, "FLAGS"), default=[],
    ),
]  # fmt: skip
ASKED = [
    flags.API,
    Option("--stream/--no-stream", "request streams; without them there is no TTFT, TPOT or ITL", None, default=True),
    flags.API_KEY,
    flags.TIMEOUT,
]
OUTPUT = [
    Option("--out", "folder for all results", FOLDER, default=Path("results")),
    Option("--name", "name of this comparison (default: the time and the policies)", metavar="NAME"),
    Option("--no-plots", "write no plots and no page", None),
]
MORE_OUTPUT = [
    Option("--readme", "also copy the table and some plots for a README to this folder", FOLDER),
    Option(
        "--cost", "cost model, or file from `simulate calibrate`, with which the simulator predicts each request "
        "(default: the measured steps of the servers)", Read(simulated.check, "FILE"),
    ),
]  # fmt: skip


def build_command() -> Command:
    what = Argument("what", "policies, name=URL of running servers, or two result files", nargs=-1, default=[])
    sections: dict[str, Sequence[Parameter]] = {
        "arguments": [what], "comparison": COMPARED, "workload": flags.sent("100; 58 with --quick"), "servers to start": STARTED,
        "requests": ASKED, "output": [*OUTPUT, *MORE_OUTPUT],
    }  # fmt: skip
    intro = (__doc__ or "").partition("\n")[0]
    return flags.command("python -m client.compare", f"{intro}\n\n{FIRST}", sections, EXAMPLES)


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Values:
    """Read the command line and fill in the values of --quick or of the full comparison."""
    args = flags.parse(build_command(), argv, environ)
    if (args.workload or "").startswith("trace:") and not args.load:
        args.load = [arrivals.Arrivals("trace", 1.0)]
    if args.model and args.load_format is None:
        args.load_format = "auto"  # a named model is meant with its own weights
    for name, value in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.quick and not any(word.startswith("--max-batch-size") for word in args.server):
        args.server = [*args.server, "--max-batch-size", QUICK_SLOTS]
    args.what = args.what or list(THREE)
    check_urls(args.what)
    flags.check_limits(args)
    if len(set(map(name_of, args.what))) < len(args.what):
        raise UsageError(f"{' '.join(args.what)} has the same name twice. Use name=URL, or each policy once")
    return args


def check_urls(what: Sequence[str]) -> None:
    """Reject a name=URL whose URL is not the address of a server."""
    for name, _, url in (word.partition("=") for word in what if "=http" in word):
        try:
            flags.base_url(url)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from error


def name_of(word: str) -> str:
    """Return the name of a policy or of a server."""
    return word.partition("=")[0] if "=http" in word else word


def server_flags(args: Values) -> list[str]:
    """Return the flags of the servers to start."""
    # Without draft tokens, which some policies cannot have: a comparison of loops should show what batching does.
    return ["--model", args.model, "--load-format", args.load_format, "--speculate", "off", *args.server]


@contextlib.contextmanager
def reached(word: str, args: Values, folder: Path) -> Iterator[Target]:
    """Yield the target of `name=URL`, or of a server that runs until the end of the block."""
    key = args.api_key
    dialect = dialects.Dialect(args.api, args.stream, temperature=args.temperature)
    with contextlib.ExitStack() as stack:
        if "=http" in word:
            url = flags.base_url(word.partition("=")[2])
        else:
            log = folder / f"server-{store.slug(word)}.log"
            url = stack.enter_context(servers.started(word, server_flags(args), log, key))
        target = Target(url, args.timeout, api_key=key, dialect=dialect)
        yield known(target) if args.api == "openai" or catalog.is_chat(args.workload) else target


def make_store(args: Values, seed: int, command: str) -> store.Store:
    """Create the folder of the results."""
    now = datetime.now().astimezone()
    names = list(map(name_of, args.what))
    called = args.name or "-".join(map(store.slug, names))[:60]
    folder = args.out / (args.name or f"{now:%Y%m%d-%H%M%S}-{called}")
    if (folder / "summary.json").exists():
        raise UsageError(f"{str(folder)!r} already has results. Use another --name")
    head = {
        "name": called, "date": now.isoformat(timespec="seconds"), "command": command, "seed": seed,
        "workload": args.workload, "loads": [pace.text for pace in args.load],
        "policies": names, "machine": runs.machine(), "versions": runs.versions(),
    }  # fmt: skip
    try:
        return store.Store(folder, head)
    except OSError as error:
        raise UsageError(f"cannot write {str(folder)!r}: {error.strerror}. Use another --out folder") from error


def run(args: Values, console: Console, command: str) -> int:
    """Send the loads to every policy; print and write the results, even if interrupted."""
    seed = secrets.randbits(32) if args.seed is None else args.seed
    loads = draw(args, seed, args.numsamples, args.workload)
    for load in loads:
        runs.allow_files(len(load.plans[0].planned), load.arrivals.kind == "burst")
        for note in load.plans[0].notes:
            say(console, f"note: {note}")
    servers.check([word, *server_flags(args)] for word in args.what if "=http" not in word)
    folder = make_store(args, seed, command)
    say(console, f"{', '.join(map(name_of, args.what))}; {args.workload}, seed {seed}")
    experiment = Experiment(folder, console, args, seed)
    experiment.write_plans(loads)

    def measure(word: str, progress: str) -> None:
        with reached(word, args, folder.folder) as target:
            experiment.run_loads(name_of(word), target, loads, progress)

    try:
        experiment.each(args.what, measure)
    finally:
        folder.close()
        if folder.summary["runs"]:
            simulated.predict(folder.folder, args.cost, console)
        ending.finish(folder.folder, console, not args.no_plots)
        if args.readme:
            ending.copy_for_readme(folder.folder, args.readme, console)
    return experiment.exit_code()


def verdict(paths: Sequence[str], different: bool, console: Console) -> int:
    """Compare two result files and print each measure with its difference."""
    from .report import verdict as judge

    both = []
    for path in paths:
        try:
            both.append(json.loads(Path(path).read_text("utf-8-sig").splitlines()[0]))
            assert isinstance(both[-1].get("e2els"), list)
        except OSError as error:
            raise UsageError(f"cannot read {path!r}: {error.strerror}. Check the path") from error
        except (ValueError, IndexError, AttributeError, AssertionError) as error:
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
    """Run the comparison and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command(console: Console) -> int:
        args = read(arguments, os.environ if environ is None else environ)
        results = [word for word in args.what if word.endswith(".json")]
        if results:
            if len(results) != 2 or len(args.what) != 2:
                raise UsageError(f"a comparison takes 2 result files, not {len(args.what)}. Use A.json B.json")
            return verdict(results, args.different, console)
        text = shlex.join(["python", "-m", "client.compare", *hidden(arguments)])
        return run(args, console, text)

    return guarded(command, lambda: None)


def hidden(arguments: Sequence[str]) -> list[str]:
    """Return the command without its key, for the page."""
    shown = list(arguments)
    for i, word in enumerate(shown):
        if word.startswith("--api-key="):
            shown[i] = "--api-key=KEY"
        elif word == "--api-key" and i + 1 < len(shown):
            shown[i + 1] = "KEY"
    return shown


if __name__ == "__main__":
    leave(main())
