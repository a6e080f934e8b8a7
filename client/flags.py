"""The client's flags, once: names, bounds, help, and what contradicts what.

Flags of the load and of the target are shared with `compare` and `sweep`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dotenv import dotenv_values
from rich.console import Console

from . import data
from .console import EXIT_CODES, UsageError, nearest, say, writable
from .send import dialects
from .send.target import Target
from .workloads import arrivals, catalog, corpus

ENV_FILE = Path(__file__).resolve().with_name(".env")
STDOUT = Path("-")
DEFAULT_PORT = 8500
DEFAULT_NUMSAMPLES = 100
DEFAULT_RATE = 1.0
SLOS = ("ttft", "tpot", "e2el")


class Parser(argparse.ArgumentParser):
    """Read flags as argparse does, but answer with our messages."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the whole usage."""
        message = message.removeprefix("argument ")
        raise UsageError(message if "Use " in message else f"{message}. Run with --help")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; a flag that is none is answered with the nearest that is one."""
        flags, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            name = unknown[0].split("=")[0]
            what = "flag" if name.startswith("-") else "argument"
            raise UsageError(f"unknown {what} {name!r}.{nearest(name, known)} Run with --help")
        return flags


def number(low: float, high: float = math.inf, kind: type = int, above: bool = False) -> Callable[[str], float]:
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


def checked(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make an argparse type of what raises ValueError; text that passes without a value stays."""

    def parse(text: str) -> Any:
        try:
            value = check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text if value is None else value

    return parse


def one_of(what: str, known: Sequence[str]) -> Callable[[str], str]:
    """Make an argparse type: one of some names."""

    def parse(text: str) -> str:
        if text in known:
            return text
        raise argparse.ArgumentTypeError(
            f"unknown {what} {text!r}.{nearest(text, known)} Use one of {', '.join(known)}"
        )

    return parse


def slo(text: str) -> tuple[str, float]:
    """Read a limit such as ttft:500."""
    name, _, limit = text.partition(":")
    try:
        value = float(limit)
    except ValueError:
        value = math.nan
    if name not in SLOS or not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a limit. Use ttft:MS, tpot:MS or e2el:MS, such as ttft:500")
    return name, value


def base_url(text: str) -> str:
    """Check a server's address; `/v1` at its end is taken off, as the routes have it."""
    url = text.rstrip("/").removesuffix("/v1")
    scheme, _, host = url.partition("://")
    if scheme not in ("http", "https") or not host or any(c in host for c in "@?# "):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a server address. Use http://HOST:PORT, and --api-key for a key"
        )
    return url


POSITIVE = number(0, kind=float, above=True)
Flags = dict[str, tuple[str, dict[str, Any]]]
SENT: Flags = {
    "--workload": ("name of the workload (see below)", {"type": checked(catalog.check), "metavar": "NAME"}),
    "--text": (
        "take prompts from this text file instead of the built-in plays",
        {"type": checked(lambda text: corpus.load(Path(text)) and None), "metavar": "FILE"},
    ),
    "--numsamples": ("number of requests (default 100)", {"type": number(1, 100_000), "metavar": "N"}),
    "--seed": (
        "seed of prompts, lengths and times (default: random, and printed)",
        {"type": number(0, 2**63 - 1), "metavar": "N"},
    ),
    "--warmup": (
        "requests sent one by one before the run, not measured (default 0)",
        {"type": number(0, 1000), "metavar": "N"},
    ),
    "--goodput": (
        "latency limits in ms for goodput, such as ttft:500 tpot:50 e2el:9000",
        {"type": slo, "metavar": "SLO", "nargs": "+", "default": []},
    ),
}
ASKED: Flags = {
    "--api": (
        "API of the server: inference (default), openai or tgi",
        {"type": one_of("api", dialects.APIS), "metavar": "inference|openai|tgi", "default": "inference"},
    ),
    "--stream": ("stream the answers, to measure TTFT, TPOT and ITL", {"action": "store_true"}),
    "--api-key": ("API key (default: EB_API_KEY in the environment or client/.env)", {"metavar": "KEY"}),
    "--timeout": (
        "cancel a request after S seconds without data (default 600)",
        {"type": POSITIVE, "metavar": "S", "default": 600.0},
    ),
}


def add(parser: argparse.ArgumentParser, title: str, flags: Flags) -> None:
    """Add flags as a group of the help."""
    group = parser.add_argument_group(title)
    for name, (help_text, options) in flags.items():
        group.add_argument(name, help=help_text, **options)


def epilog(first: str, examples: Sequence[str]) -> str:
    """Write what stands below the flags: loads, workloads, examples and exit codes."""
    loads = [(form, text) for form, text, *_ in arrivals.KINDS.values() if form[:5] != "trace"]
    listed = [
        f"{title}:\n" + "\n".join(f"  {name:<21}{text}" for name, text in lines)
        for title, lines in (("loads", loads), ("workloads", catalog.describe()))
    ]
    shown = "examples:\n" + "\n".join(f"  {line}" for line in examples)
    return "\n\n".join([first, *listed, shown, EXIT_CODES]).strip()


def stored(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Read client/.env and the environment, which wins."""
    try:
        lines = dotenv_values(ENV_FILE) if ENV_FILE.is_file() else {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read client/.env: {error}. Use plain UTF-8 text") from error
    return {**lines, **{name: text for name, text in environ.items() if text}}


def api_key(flag: str | None, known: Mapping[str, str | None]) -> str | None:
    """Find the key: the flag, then the environment, then client/.env."""
    key = flag or known.get("EB_API_KEY") or None
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError("the API key has characters that are not allowed in an HTTP header. Use printable ASCII")
    return key


def make_target(flags: argparse.Namespace, environ: Mapping[str, str], console: Console) -> Target:
    """Make the target of --url, or of IP and --port."""
    known = stored(environ)
    url = flags.url
    if not url:
        host = (known.get("IP") or "").strip()
        if not host:
            host = "127.0.0.1"
            say(console, "note: IP is not set in client/.env or the environment; using 127.0.0.1")
        if any(c in host for c in "/@?# ") or host.count(":") == 1:
            raise UsageError(
                f"IP is {host!r}, but must be a host name or an address. "
                "Set IP=10.0.0.5 in client/.env and use --port for the port"
            )
        url = f"http://{f'[{host}]' if ':' in host else host}:{flags.port}"
    dialect = dialects.Dialect(flags.api, flags.stream, flags.model)
    return Target(url, flags.timeout, api_key=api_key(flags.api_key, known), dialect=dialect)


def check(flags: argparse.Namespace) -> None:
    """Refuse flags of the client that contradict each other, and files that cannot be written."""
    pace = [("--burst", flags.burst), ("--rate", flags.rate), ("--wait", flags.wait is not None),
            ("--load", flags.load)]  # fmt: skip
    given = [name for name, there in pace if there]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other. Use only one of them")
    if flags.prompt == "":
        raise UsageError("--prompt is empty. Use at least one character")
    if flags.prompt is not None and flags.numtokens is None:
        raise UsageError("--prompt needs a length. Use --prompt TEXT --numtokens 40")
    if flags.numtokens is not None and flags.prompt is None:
        raise UsageError(
            f"--numtokens {flags.numtokens} goes with --prompt. Use --numtokens_range "
            f"{flags.numtokens} to fix the length in a load run"
        )
    if flags.prompt is not None and (flags.burst or flags.rate or flags.load):
        raise UsageError(f"--prompt sends a single request. Remove {given[0]}")
    if flags.workload and (flags.selection or flags.numtokens_range):
        raise UsageError(f"--workload {flags.workload} draws its own lengths. Remove --selection and --numtokens_range")
    if flags.numtokens_range and flags.selection not in (None, *data.RANGE_SELECTIONS):
        raise UsageError(
            f"--selection {flags.selection} draws its own lengths. Use it without "
            f"--numtokens_range, or use --selection {', '.join(data.RANGE_SELECTIONS)}"
        )
    check_limits(flags)
    for flag, path in (("--json", flags.json), ("--csv", flags.csv)):
        if path and path != STDOUT:
            writable(path, flag)


def check_limits(flags: argparse.Namespace) -> None:
    """Refuse limits on what is only known of streams."""
    wanted = [name for name, _ in flags.goodput if name in ("ttft", "tpot")]
    if wanted and not flags.stream:
        raise UsageError(f"--goodput {wanted[0]} can only be measured with streams. Add --stream, or use e2el:MS")
