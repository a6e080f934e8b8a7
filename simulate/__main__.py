"""The command line of the simulator: text for people on stderr, one JSON object as the last line of stdout."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import config
from client.options import FILE, FOLDER, POSITIVE, Argument, Choice, Command, Number, Option, Parameter, Values, read
from scheduling.renamed import RenamedWarning
from scheduling.scheduler import PolicyError
from simulate import commands, comparison, fleet, prefix, validate
from simulate.arguments import arrival_options, engine_options, policies_argument, say

Sections = dict[str, Sequence[Parameter]]

COMMANDS = {
    "run": "Serve a workload with one or more policies and report the result of each.",
    "plan": "Find the highest rate that each policy sustains, and the replicas that a rate needs.",
    "fleet": "Serve a workload with many replicas behind a router.",
    "prefix": "Compare prefix caches: hits, TTFT and TPOT by cache and batch size.",
    "calibrate": "Time the engine on this machine and fit a cost model to it.",
    "validate": "Send the same arrivals through a real server and the simulator, side by side.",
    "predict": "Simulate the requests of a comparison and show the predictions beside the measurements.",
    "check": "Test a policy on thousands of random cases and report which law it breaks.",
}
EXAMPLES = """\b
  python -m simulate run dynamic static --rate 2 --out results/mine
  python -m simulate calibrate --model bard --out cost.json
  python -m simulate plan dynamic --cost cost.json --ttft 1 --itl 0.1 --rate 6
  python -m simulate plan dynamic --trace trace.csv --context 1024 --speed 2
  python -m simulate run dynamic dynamic+vtc --rate 9 --clients 4
"""


def build_command(name: str) -> Command:
    """Return the command line of one command."""
    return Command(f"python -m simulate {name}", COMMANDS[name], SECTIONS[name](), {"": NOTES.get(name, "")})


def _run_options() -> Sections:
    return {
        "arguments": [policies_argument()],
        "engine": engine_options(),
        "arrivals": arrival_options(),
        "result": [
            Option("--out", "folder for all that client.compare writes, too", FOLDER),
            Option("--no-plots", "leave pictures and page out", None),
            Option("--no-records", "write no iterations.jsonl: much faster for long runs", None),
            *(Option(f"--{name}", "limit in seconds, for the goodput", POSITIVE) for name in ("ttft", "tpot", "e2el")),
        ],
    }


def _plan_options() -> Sections:
    return {
        "arguments": [policies_argument()],
        "engine": engine_options(),
        "arrivals": arrival_options(num=2200, rate=10.0),
        "plan": [
            Option("--ttft", "p99 limit in seconds (default 1, if no limit is given)", POSITIVE),
            Option("--itl", "p99 limit in seconds (default 0.1, if no limit is given)", POSITIVE),
            Option(
                "--limit", "as in p50:queue:2; may be repeated", metavar="STAT:MEASURE:S", repeat=True, default=[]
            ),
            Option("--slots", "batch sizes to try (default: --max-batch-size)", Number(1), several=True),
            Option(
                "--shortest-queue", "also find how many replicas hold the rate when each request joins the shortest "
                "queue, if N or fewer do", Number(1), default=0,
            ),
            Option("--out", "picture of the capacities (.png or .svg)", FILE),
        ],
    }  # fmt: skip


def _fleet_options() -> Sections:
    routers = f"{', '.join(fleet.ROUTERS)}; may be repeated (default: all that fit)"
    return {
        "arguments": [policies_argument()],
        "engine": engine_options(),
        "arrivals": arrival_options(num=5000),
        "fleet": [
            Option("--replicas", "number of replicas", Number(1), default=8),
            Option("--router", routers, repeat=True),
        ],
    }


def _prefix_options() -> Sections:
    return {
        "options": [
            Option("--cost", "a named model, or a file of `calibrate`", default="llm-mock"),
            Option(
                "--kinds", "trie: llm-mock's, of the most visited edges; live: the server's pages; lpm: longest hit "
                "first", Choice(prefix.KINDS, "KIND"), several=True, default=list(prefix.KINDS),
            ),
            Option(
                "--sizes", "tokens that the cache holds: edges of the trie, or in pages of 16", Number(0),
                several=True, default=[0, 100, 300, 1000, 2000, 5000],
            ),
            Option("--batches", "batch sizes", Number(1), several=True, default=[1, 5, 10, 20]),
            Option("--share", "tokens of a shared prompt", Number(0), several=True, default=[0, 200]),
            Option("--train", "prompts that fill the cache before", Number(1), default=5000),
            Option("--trace", "Mooncake's JSON lines: the caches by hits alone", FILE),
            Option("--out", "folder for the figures and plots", FOLDER),
        ]
    }  # fmt: skip


def _calibrate_options() -> Sections:
    return {
        "options": [
            Option("--model", "model to time", default="gpt2-medium"),
            Option("--load-format", "dummy: random weights of that shape", Choice(["auto", "dummy"]), default="auto"),
            Option("--dtype", "number format", Choice(["auto", "float32", "bfloat16"]), default="auto"),
            Option("--threads", "compute threads; 0: as many as the server uses", Number(0), default=0),
            Option("--grid", "points to time", Choice(["small", "full"]), default="small"),
            Option("--max-tokens-per-step", "the longest piece of a prompt", Number(8), default=256),
            Option("--steps", "steps of each point, at each of two times", Number(1), default=5),
            Option("--statistic", "min: when others use the machine too", Choice(["median", "min"]), default="median"),
            Option("--out", "file to write", FILE, default=Path("cost.json")),
        ]
    }


def _validate_options() -> Sections:
    timed = " (default: that of --model mock:NAME; for any other --model its engine is timed first)"
    return {
        "arguments": [policies_argument()],
        # No --kv-tokens: the server reports its KV memory.
        "engine": engine_options(kv=False, cost=None, default_cost=timed, max_tokens_per_step=256),
        "arrivals": [
            Option("--rate", "requests per second; choose a utilization of about 0.7", POSITIVE, default=1.0),
            Option("--num", "requests", Number(1), default=60),
            Option("--seed", "seed of everything drawn", Number(0), default=0),
        ],
        "server": [
            Option(
                "--server-flag", "a flag of the server in another form, as in --server-flag=--model=bard; may be "
                "repeated", metavar="FLAG", repeat=True, default=[],
            ),
            *validate.server_options(),
        ],
    }  # fmt: skip


def _predict_options() -> Sections:
    return {
        "arguments": [Argument("folder", "folder that client.compare wrote", FOLDER, required=True, metavar="DIR")],
        "options": [Option("--cost", "a named model, or a file of `calibrate` (default: the runs' own steps)")],
    }


NOTES = {
    "plan": "The arrivals are played faster and slower to find the highest rate. --rate is the rate that the replicas have to "
    "hold; with --trace it is the trace's own, times --speed, unless it is given.",
    "validate": f"The command also takes these flags of the server, see './server.sh --help': "
    f"{', '.join(map(config.flag, validate.SERVER))}.\n\nBounds: {comparison.BOUNDS}.\n\n"
    "Exit status: 0 within the bounds, 1 beyond one or when a request fails, 2 for a wrong command line.",
}
SECTIONS: dict[str, Callable[[], Sections]] = {
    "run": _run_options, "plan": _plan_options, "fleet": _fleet_options, "prefix": _prefix_options,
    "calibrate": _calibrate_options, "validate": _validate_options, "predict": _predict_options,
}  # fmt: skip
ACTS: dict[str, Callable[[Values, Console], dict[str, Any]]] = {
    "run": commands.run_command, "plan": commands.plan_command, "fleet": commands.fleet_command,
    "prefix": commands.prefix_command, "calibrate": commands.calibrate_command, "validate": commands.validate_command,
    "predict": commands.predict_command,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0 on success, 1 when a bound or law was broken or a step failed, 2 for a wrong command line."""
    warnings.simplefilter("once", RenamedWarning)
    argv = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True)
    try:
        command = _command(argv)
        if command == "check":
            from simulate import check

            return check.main(argv[1:])
        args = read(build_command(command), argv[1:])
        args.command_line = shlex.join(["python", "-m", "simulate", *argv])
        told = ACTS[command](args, console)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, PolicyError, RuntimeError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            say(console, f"error: cannot open {error.filename!r}: {error.strerror}. Check the path")
            return 2
        say(console, f"error: {error}")
        return 2 if isinstance(error, ValueError) else 1
    sys.stdout.write(json.dumps(told) + "\n")
    return 0 if told.get("good", True) else 1


def _command(argv: Sequence[str]) -> str:
    """Return the name of the command; print the help and end the process if there is none."""
    names = Argument("command", "one of the commands below", Choice(COMMANDS, "COMMAND"), required=True)
    more: dict[str, str | Sequence[tuple[str, str]]] = {"commands": [*COMMANDS.items()], "examples": EXAMPLES}
    return str(read(Command("python -m simulate", __doc__ or "", {"arguments": [names]}, more), argv[:1]).command)


if __name__ == "__main__":
    raise SystemExit(main())
