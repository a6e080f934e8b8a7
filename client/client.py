"""The client's command line: a load run with its numbers, or one prompt with its completion.

    python3 client.py --numsamples 100            about one request a second
    python3 client.py --prompt "hi" --numtokens 10

Human text goes to stderr; on stdout the last line is one JSON object. It must not know the
server's code: this folder and its requirements.txt are all that a client machine needs.
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import requests
from dotenv import dotenv_values
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

# Started as a script this folder is on the path; with -m or imported it is a package.
if __package__:
    from . import data, load, measure
else:
    import data
    import load
    import measure

FINE, SOME_FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130
ENV_FILE = Path(__file__).resolve().with_name(".env")
DEFAULT_PORT = 8500
DEFAULT_NUMSAMPLES = 100
DEFAULT_RATE = 1.0
REDRAWS_A_SECOND = 4
PLAIN_LINE_SECONDS = 5.0
# After the first Ctrl-C, what is on its way may still finish for so long.
GRACE_SECONDS = 10.0
SPARE_FILES = 128

EPILOG = f"""\
without further flags: {DEFAULT_NUMSAMPLES} requests, about one a second (Poisson), num_tokens
from a normal distribution (mean {data.NORMAL_MEAN}, sd {data.NORMAL_SD}) cut to \
{data.NORMAL_LOW}..{data.NORMAL_HIGH}, prompts of {data.MIN_WORDS}-{data.MAX_WORDS} words

examples:
  python3 client.py --numsamples 100
  python3 client.py --rate 4 --seed 1 --json result.json
  python3 client.py --burst --numsamples 64 --numtokens_range 10 20 40
  python3 client.py --prompt "hi" --numtokens 10

exit codes: {FINE} fine, {SOME_FAILED} some requests failed or were not sent, {USAGE} usage, \
{UNREACHABLE} server unreachable
"""


class UsageError(Exception):
    """What was asked cannot be done; the text names the value and the remedy."""


class Parser(argparse.ArgumentParser):
    """Read flags as argparse does, but answer with our messages."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage."""
        message = message.removeprefix("argument ")
        raise UsageError(message if "Use " in message else f"{message}. Run with --help")


def number(
    low: float, high: float = math.inf, kind: type = int, above: bool = False
) -> Callable[[str], float]:
    """Make an argparse type: a finite number from `low` to `high` (`above`: not `low` itself)."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high) or math.isinf(value) or (above and value == low):
            what = "a whole number" if kind is int else "a number"
            bound = f"above {low:g}" if above else f"of at least {low}"
            bound += f", at most {high:,}" if high < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed. Use {what} {bound}")
        return value

    return parse


def selection(text: str) -> str:
    """Check the name of a selection."""
    if text in data.SELECTIONS:
        return text
    raise argparse.ArgumentTypeError(
        f"unknown selection {text!r}.{_nearest(text, data.SELECTIONS)} "
        f"Use one of {', '.join(data.SELECTIONS)}"
    )


_POSITIVE = number(0, kind=float, above=True)
FLAGS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "what to send": {
        "--numsamples": ("number of requests (100)", {"type": number(1, 100_000), "metavar": "N"}),
        "--selection": (
            "how lengths and prompts are drawn: normal (default); range: from --numtokens_range, "
            "prompts as long; buckets: 5, 10 .. 145; random, descend: from --numtokens_range, "
            "prompts short, descend: longest first",
            {"type": selection, "metavar": "HOW"},
        ),
        "--numtokens_range": (
            "lengths to draw from, e.g. 10 20 40 (1 25 100); implies --selection range",
            {"type": number(1, data.MAX_NUM_TOKENS), "metavar": "N", "nargs": "+"},
        ),
        "--seed": (
            "same seed, same prompts, lengths and times (drawn and printed); "
            "with --prompt it goes to the server",
            {"type": number(0, 2**63 - 1), "metavar": "N"},
        ),
        "--prompt": ("send this prompt alone and print the completion", {"metavar": "TEXT"}),
        "--numtokens": ("tokens to generate for --prompt", {"type": number(1), "metavar": "N"}),
    },
    "when to send": {
        "--rate": (
            "requests a second, Poisson, open loop (1)",
            {"type": _POSITIVE, "metavar": "R"},
        ),
        "--wait": (
            "the original's pace: a random 0 to S seconds between two requests",
            {"type": number(0, kind=float), "metavar": "S"},
        ),
        "--burst": ("all at once", {"action": "store_true"}),
    },
    "where to": {
        "--port": (
            "port (8500); the host is IP in the environment or client/.env (127.0.0.1)",
            {"type": number(1, 65535), "metavar": "P", "default": DEFAULT_PORT},
        ),
        "--api-key": ("API key (EB_API_KEY in the environment or client/.env)", {"metavar": "KEY"}),
        "--timeout": (
            "give a request up after S seconds of silence (600)",
            {"type": _POSITIVE, "metavar": "S", "default": 600.0},
        ),
    },
    "output": {
        "--json": ("write the result to FILE too", {"type": Path, "metavar": "FILE"}),
        "--verbose": ("print the completions of a load run too", {"action": "store_true"}),
    },
}


def build_parser() -> Parser:
    """Build the command line; its defaults are None where a given flag must be told from none."""
    parser = Parser(
        prog="client.py",
        description="Send load, or one prompt, to an effective-batching server.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, (help_text, options) in flags.items():
            group.add_argument(name, help=help_text, **options)
    return parser


@dataclass(frozen=True, slots=True)
class Settings:
    """What one start of the client does, checked."""

    target: load.Target
    flags: argparse.Namespace
    numsamples: int
    selection: str
    arrivals: data.Arrivals
    seed: int

    def config(self) -> dict[str, Any]:
        """Give what repeats this run, without the key."""
        return {
            "numsamples": self.numsamples,
            "selection": self.selection,
            "numtokens_range": self.flags.numtokens_range,
            "arrivals": self.arrivals.kind,
            "value": self.arrivals.value,
            "url": self.target.url,
            "timeout": self.target.timeout,
        }


def read_settings(argv: Sequence[str], environ: Mapping[str, str], console: Console) -> Settings:
    """Read flags, environment and client/.env (in this order of precedence) into settings."""
    parser = build_parser()
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [name for flags_of_group in FLAGS.values() for name in flags_of_group]
        name = unknown[0].split("=")[0]
        what = "flag" if name.startswith("-") else "argument"
        raise UsageError(f"unknown {what} {name!r}.{_nearest(name, known)} Run with --help")
    check_flags(flags)
    ranged = "range" if flags.numtokens_range else "normal"
    arrivals = data.Arrivals("poisson", flags.rate or DEFAULT_RATE)
    if flags.burst:
        arrivals = data.Arrivals("burst")
    elif flags.wait is not None:
        arrivals = data.Arrivals("wait", flags.wait)
    return Settings(
        target=read_target(flags, environ, console),
        flags=flags,
        numsamples=flags.numsamples or DEFAULT_NUMSAMPLES,
        selection=flags.selection or ranged,
        arrivals=arrivals,
        seed=secrets.randbits(32) if flags.seed is None else flags.seed,
    )


def check_flags(flags: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, and a result file that cannot be written."""
    pace = [("--burst", flags.burst), ("--rate", flags.rate), ("--wait", flags.wait is not None)]
    given = [name for name, there in pace if there]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} contradict each other. Use one of them")
    if flags.prompt == "":
        raise UsageError("--prompt is empty. Use at least one character")
    if flags.prompt is not None and flags.numtokens is None:
        raise UsageError("--prompt needs a length. Use --prompt TEXT --numtokens 40")
    if flags.numtokens is not None and flags.prompt is None:
        raise UsageError(
            f"--numtokens {flags.numtokens} goes with --prompt. Use --numtokens_range "
            f"{flags.numtokens} to fix the length in a load run"
        )
    if flags.prompt is not None and (flags.burst or flags.rate):
        raise UsageError(f"--prompt sends one request. Use it without {given[0]}")
    if flags.numtokens_range and flags.selection not in (None, *data.RANGE_SELECTIONS):
        raise UsageError(
            f"--selection {flags.selection} draws its own lengths. Use it without "
            f"--numtokens_range, or use --selection {', '.join(data.RANGE_SELECTIONS)}"
        )
    if flags.json:
        try:
            flags.json.open("a").close()
        except OSError as error:
            raise UsageError(
                f"cannot write {str(flags.json)!r}: {error.strerror}. Use another --json file"
            ) from error


def read_target(
    flags: argparse.Namespace, environ: Mapping[str, str], console: Console
) -> load.Target:
    """Find host and key: the flag, then the environment, then client/.env."""
    try:
        stored = dotenv_values(ENV_FILE) if ENV_FILE.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read client/.env: {error}. Use plain UTF-8 text") from error
    host = (environ.get("IP") or stored.get("IP") or "").strip()
    if not host:
        host = "127.0.0.1"
        say(console, "note: IP is not set in client/.env or the environment; using 127.0.0.1")
    if any(c in host for c in "/@?# ") or host.count(":") == 1:
        raise UsageError(
            f"IP is {host!r}, it holds a host name or an address only. "
            "Set IP=10.0.0.5 in client/.env and use --port for the port"
        )
    key = flags.api_key or environ.get("EB_API_KEY") or stored.get("EB_API_KEY") or None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError("the API key has characters no HTTP header holds. Use printable ASCII")
    shown = f"[{host}]" if ":" in host else host
    return load.Target(f"http://{shown}:{flags.port}", flags.timeout, api_key=key)


class Display(threading.Thread):
    """Show how far a run is, from a thread of its own: redrawn on a terminal, else line by line."""

    def __init__(self, run: load.LoadRun, console: Console, last_send: float) -> None:
        super().__init__(name="display", daemon=True)
        self._run = run
        self._console = console
        self._last_send = last_send
        self._over = threading.Event()

    def close(self) -> None:
        """Draw the last state and stop."""
        self._over.set()
        self.join()

    def run(self) -> None:
        """Draw until closed."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            while not self._over.wait(PLAIN_LINE_SECONDS):
                say(self._console, self.line(self._run.counts()))
            return
        columns = (BarColumn(bar_width=16), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=self._console, auto_refresh=False) as progress:
            task = progress.add_task("", total=self._run.counts().total)
            over = False
            while not over:
                over = self._over.wait(1 / REDRAWS_A_SECOND)
                counts = self._run.counts()
                ended = counts.done + counts.failed
                progress.update(task, completed=ended, description=self.line(counts), refresh=True)

    def line(self, counts: load.Counts) -> str:
        """Say how far the run is, in one line."""
        ended = counts.done + counts.failed
        left = self._last_send - counts.seconds
        if ended:
            left = max(left, (counts.total - ended) * counts.seconds / ended)
        eta = f"{max(0.0, left):.0f} s" if ended or left > 0 else "-"
        return (
            f"sent {counts.sent}/{counts.total}  running {counts.running}  done {counts.done}  "
            f"failed {counts.failed}  {counts.tokens / max(counts.seconds, 1e-9):,.0f} tokens/s  "
            f"ETA {eta}"
        )


def run_single(settings: Settings, console: Console) -> int:
    """Send one prompt, print its completion and, as the last line, the answer as JSON."""
    flags = settings.flags
    if flags.numsamples or flags.wait is not None or flags.numtokens_range or flags.selection:
        say(console, "note: --prompt sends one request; the flags of a load run are ignored")
    seed = {} if flags.seed is None else {"seed": flags.seed}
    planned = data.Planned(0, 0.0, flags.prompt, flags.numtokens)
    start = time.perf_counter()
    # Somebody waits at the terminal: a wrong address should show soon.
    target = replace(settings.target, connect_timeout=load.CONNECT_SECONDS)
    with target.session() as session:
        outcome, answer = load.ask(
            session, target, planned, lambda: time.perf_counter() - start, **seed
        )
    if outcome.error == load.CANNOT_CONNECT:
        raise load.ServerUnreachable(outcome.detail)
    if outcome.error.startswith("HTTP 401"):
        raise load.KeyRefused
    if outcome.error:
        say(console, f"error: {outcome.error}: {outcome.detail}")
    else:
        emit(outcome.completion)
    write_result({**answer, "e2el_ms": outcome.latency * 1000}, flags.json, console)
    return SOME_FAILED if outcome.error else FINE


def run_load(settings: Settings, console: Console) -> int:
    """Send a whole run, then show its numbers, the server's `/stats` and the JSON line."""
    flags = settings.flags
    before = load.fetch_stats(settings.target)
    trace = data.plan(
        settings.numsamples,
        flags.numtokens_range,
        settings.selection,
        settings.arrivals,
        settings.seed,
    )
    allow_files(settings.numsamples, settings.arrivals.kind == "burst")
    say(
        console,
        f"{settings.numsamples} requests to {settings.target.url}, {settings.arrivals.describe()}, "
        f"lengths: {settings.selection}, seed {settings.seed}",
    )
    outcomes = send(settings.target, trace, console)
    try:
        after = load.fetch_stats(settings.target)
    except (load.ServerUnreachable, load.KeyRefused):
        after = None
    numbers = measure.result(outcomes, facts(settings, trace, before, after))
    show(numbers, outcomes, console)
    if flags.verbose:
        for outcome in sorted(outcomes, key=lambda outcome: outcome.index):
            say(console, f"--- request {outcome.index}\n{outcome.completion or outcome.error}")
    write_result(numbers, flags.json, console)
    return SOME_FAILED if numbers["failed"] or numbers["unsent"] else FINE


def send(
    target: load.Target, trace: Sequence[data.Planned], console: Console
) -> list[measure.Outcome]:
    """Run a trace to its end, or to the first Ctrl-C and a short while after it."""
    run = load.LoadRun(target, trace)
    display = Display(run, console, trace[-1].at)
    display.start()
    try:
        run.start()
        # In slices: a wait without end would not notice Ctrl-C on Windows.
        while not run.wait(1):
            pass
    except RuntimeError as error:
        raise UsageError(f"{error}. Run 'ulimit -u 8192' or lower --numsamples") from error
    except KeyboardInterrupt:
        run.stop()
        say(
            console,
            f"stopped sending; what is on its way has {GRACE_SECONDS:.0f} s to finish. "
            "Ctrl-C again leaves at once",
        )
        run.wait(GRACE_SECONDS)
    finally:
        display.close()
    return run.outcomes()


def facts(
    settings: Settings,
    trace: Sequence[data.Planned],
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
) -> measure.RunFacts:
    """Collect what the result says besides its figures."""
    return measure.RunFacts(
        date=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        config=settings.config(),
        seed=settings.seed,
        trace_sha256=data.trace_sha256(trace),
        request_rate=settings.arrivals.rate,
        burstiness=1.0 if settings.arrivals.kind == "poisson" else None,
        num_prompts=len(trace),
        server_before=before,
        server_after=after,
        machine={"platform": platform.platform(), "cpus": os.cpu_count()},
        versions={
            "python": platform.python_version(),
            "numpy": np.__version__,
            "requests": requests.__version__,
        },
    )


def show(numbers: Mapping[str, Any], outcomes: Sequence[measure.Outcome], console: Console) -> None:
    """Print warnings, the table and the server's `/stats`."""
    for warning in measure.warnings(numbers, outcomes):
        say(console, f"warning: {warning}")
    table = Table(title="Result", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for label, value in measure.rows(numbers):
        table.add_row(label, value)
    console.print(table)
    if numbers["server_after"] is None:
        say(console, "warning: the server gave no /stats after the run")
        return
    say(console, "Server /stats:")
    console.print_json(data=numbers["server_after"])


def write_result(numbers: Mapping[str, Any], path: Path | None, console: Console) -> None:
    """Print the JSON line, and keep it in the file that was asked for."""
    line = json.dumps(numbers)
    if path:
        try:
            path.write_text(line + "\n", encoding="utf-8")
        except OSError as error:
            say(console, f"error: cannot write {str(path)!r}: {error.strerror}. It is on stdout")
    emit(line)


def allow_files(connections: int, burst: bool) -> None:
    """Raise the open-file limit for so many connections; a burst that cannot fit is refused."""
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return
    need = connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    best = need if hard == resource.RLIM_INFINITY else min(need, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
        soft = best
    if burst and soft < need:
        raise UsageError(
            f"the open-file limit is {soft:,}, {connections:,} connections need {need:,}. "
            f"Run 'ulimit -n {need}' or lower --numsamples"
        )


def say(console: Console, text: str) -> None:
    """Print a line for people; brackets in it are just brackets."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def emit(text: str) -> None:
    """Print a line for machines, whatever characters a completion holds."""
    encoding = sys.stdout.encoding or "utf-8"
    # A reader like `head` may be gone already; that is its right.
    with contextlib.suppress(BrokenPipeError):
        print(text.encode(encoding, "replace").decode(encoding), flush=True)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the client and give its exit code."""
    console = Console(stderr=True)
    url = ""
    try:
        arguments = sys.argv[1:] if argv is None else argv
        settings = read_settings(arguments, os.environ if environ is None else environ, console)
        url = settings.target.url
        if settings.flags.prompt is not None:
            return run_single(settings, console)
        return run_load(settings, console)
    except UsageError as error:
        say(console, f"error: {error}")
        return USAGE
    except load.KeyRefused:
        say(console, f"error: {url} wants an API key. Set EB_API_KEY or use --api-key KEY")
        return USAGE
    except load.ServerUnreachable:
        say(
            console,
            f"error: cannot reach {url}. Is the server running? Start it with "
            "./server.sh dynamic, or set IP in client/.env",
        )
        return UNREACHABLE
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
