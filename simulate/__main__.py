"""The command line of the simulator: text for people on stderr, one JSON object as the last line of stdout."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from scheduling.scheduler import PolicyError
from simulate import commands, comparison, fleet, prefix, validate
from simulate.arguments import Parser, UsageError, add_engine, add_workload, positive, say, whole

COMMANDS = {
    "run": "serve a workload with one or more policies and say what each did",
    "plan": "find the highest rate that each policy holds, and the replicas that a rate needs",
    "fleet": "serve a workload with many replicas behind a router",
    "prefix": "compare prefix caches: hits, TTFT and TPOT against cache and batch size",
    "calibrate": "time the engine on this machine and fit a cost model to it",
    "validate": "send the same arrivals through a real server and the simulator, side by side",
    "predict": "serve the requests of a comparison again, and set what comes of it beside what was measured",
    "check": "try a policy on thousands of random cases, small and large, and say which law it breaks",
}


EPILOG = """examples:
  python -m simulate run dynamic static --workload clipped-normal --rate 2 --out results/mine
  python -m simulate calibrate --model gpt2-medium --load-format dummy --out cost.json
  python -m simulate plan dynamic static --cost cost.json --ttft 1 --itl 0.1 --rate 6
  python -m simulate plan dynamic --trace trace.csv --context 1024 --speed 2
  python -m simulate run dynamic dynamic+vtc --rate 9 --max-batch-size 8 --clients 4
"""


def build_parser(command: str) -> Parser:
    """Return the parser of one command."""
    parser = Parser(prog=f"python -m simulate {command}", description=COMMANDS[command])
    FLAGS[command](parser)
    return parser


def _run_flags(parser: Parser) -> None:
    add_engine(parser)
    add_workload(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for all that client.compare writes, too")
    parser.add_argument("--no-plots", action="store_true", help="leave pictures and page out")
    parser.add_argument(
        "--no-records", action="store_true", help="write no iterations.jsonl: much faster for long runs"
    )
    for name in ("ttft", "tpot", "e2el"):
        parser.add_argument(f"--{name}", type=positive, help="limit in seconds, for the goodput")


def _plan_flags(parser: Parser) -> None:
    add_engine(parser)
    add_workload(parser, num=2200)
    parser.set_defaults(rate=10.0)
    parser.epilog = (
        "The arrivals are played faster and slower to find the highest rate. --rate is the rate that the replicas have "
        "to hold; with --trace it is the trace's own, times --speed, unless it is given."
    )
    parser.add_argument("--ttft", type=positive, help="p99 limit in seconds (default 1, if no limit is given)")
    parser.add_argument("--itl", type=positive, help="p99 limit in seconds (default 0.1, if no limit is given)")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="STAT:MEASURE:S", help="as in p50:queue:2; may be repeated"
    )
    parser.add_argument("--slots", type=whole(1), nargs="+", help="batch sizes to try (default: --max-batch-size)")
    parser.add_argument(
        "--shortest-queue",
        type=whole(1),
        default=0,
        metavar="N",
        help="also find how many replicas hold the rate when each request joins the shortest queue, if N or fewer do",
    )
    parser.add_argument("--out", type=Path, help="picture of the capacities (.png or .svg)")


def _fleet_flags(parser: Parser) -> None:
    add_engine(parser)
    add_workload(parser, num=5000)
    parser.add_argument("--replicas", type=whole(1), default=8, help="(default %(default)s)")
    parser.add_argument(
        "--router", action="append", help=f"{', '.join(fleet.ROUTERS)}; may be repeated (default: all that fit)"
    )


def _prefix_flags(parser: Parser) -> None:
    parser.add_argument("--cost", default="llm-mock", help="(default %(default)s)")
    parser.add_argument(
        "--kinds", nargs="+", default=list(prefix.KINDS), choices=prefix.KINDS,
        help="trie: llm-mock's, of the most visited edges; live: the server's pages; lpm: longest hit first (all)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=whole(0), nargs="+", default=[0, 100, 300, 1000, 2000, 5000],
        help="tokens that the cache holds: edges of the trie, or in pages of 16",
    )  # fmt: skip
    parser.add_argument("--batches", type=whole(1), nargs="+", default=[1, 5, 10, 20], help="batch sizes")
    parser.add_argument("--share", type=whole(0), nargs="+", default=[0, 200], help="tokens of a shared prompt")
    parser.add_argument("--train", type=whole(1), default=5000, help="prompts that were there before (%(default)s)")
    parser.add_argument("--trace", type=Path, help="Mooncake's JSON lines: the caches by hits alone")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the figures and plots")


def _calibrate_flags(parser: Parser) -> None:
    parser.add_argument("--model", default="gpt2-medium", help="(default %(default)s)")
    parser.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"), help="dummy: random weights of that shape"
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=whole(0), default=0, help="0: as the server takes")
    parser.add_argument("--grid", default="small", choices=("small", "full"))
    parser.add_argument(
        "--max-tokens-per-step", type=whole(8), default=256, help="the longest piece of a prompt (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=whole(1), default=5, help="of each point, each of two times (default %(default)s)"
    )
    parser.add_argument(
        "--statistic", default="median", choices=("median", "min"), help="min: when others use the machine too"
    )
    parser.add_argument("--out", type=Path, default=Path("cost.json"), help="(default %(default)s)")


def _validate_flags(parser: Parser) -> None:
    timed = "that of --model mock:NAME; for any other --model its engine is timed first"
    add_engine(parser, kv=False, cost=None, default=timed)  # the server says how much KV room it has
    parser.set_defaults(max_tokens_per_step=256)
    parser.epilog = (
        f"Bounds: {comparison.BOUNDS}. Exit status: 0 within the bounds, 1 beyond one or when a request fails, 2 for a "
        "wrong command line."
    )
    parser.add_argument(
        "--rate", type=positive, default=1.0,
        help="requests a second; choose a utilization of about 0.7 (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--num", type=whole(1), default=60, help="requests (default %(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of everything drawn (default %(default)s)")
    parser.add_argument(
        "--server-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="the same in another form, as in --server-flag=--model=bard; may be repeated",
    )
    validate.add_server_flags(parser)


def _predict_flags(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what client.compare wrote")
    parser.add_argument("--cost", help="a named model, or a file of `calibrate` (default: the runs' own steps)")


FLAGS: dict[str, Callable[[Parser], None]] = {
    "run": _run_flags, "plan": _plan_flags, "fleet": _fleet_flags, "prefix": _prefix_flags,
    "calibrate": _calibrate_flags, "validate": _validate_flags, "predict": _predict_flags,
}  # fmt: skip
ACTS: dict[str, Callable[[Namespace, Console], dict[str, Any]]] = {
    "run": commands.run_command, "plan": commands.plan_command, "fleet": commands.fleet_command,
    "prefix": commands.prefix_command, "calibrate": commands.calibrate_command, "validate": commands.validate_command,
    "predict": commands.predict_command,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command: 0 on success, 1 when a bound or law was broken or a step failed, 2 for a wrong command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True)
    try:
        command = _command(argv)
        if command == "check":
            from simulate import check

            return check.main(argv[1:])
        args = build_parser(command).parse_args(argv[1:])
        args.command_line = shlex.join(["python", "-m", "simulate", *argv])
        told = ACTS[command](args, console)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, PolicyError, RuntimeError) as error:
        named = isinstance(error, OSError) and error.filename is not None
        words = f"cannot open {error.filename!r}: {error.strerror}. Check the path" if named else error
        say(console, f"error: {words}")
        return 2 if named or isinstance(error, ValueError) else 1
    sys.stdout.write(json.dumps(told) + "\n")
    return 0 if told.get("good", True) else 1


def _command(argv: Sequence[str]) -> str:
    parser = Parser(
        prog="python -m simulate", description=__doc__, epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter
    )
    listed = "\n".join(f"{name:10} {words}" for name, words in COMMANDS.items())
    parser.description = f"{__doc__}\n\ncommands:\n{listed}"
    parser.add_argument("command", nargs="?", help="one of the above; python -m simulate COMMAND --help")
    found = parser.parse_args(argv[:1]).command
    if found is None:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if found not in COMMANDS:
        near = get_close_matches(found, COMMANDS, 1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"unknown command {found!r}.{guess} Use one of: {', '.join(COMMANDS)}")
    return str(found)


if __name__ == "__main__":
    raise SystemExit(main())
